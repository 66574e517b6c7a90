"""Decodes as a graph has them, on Triton's kernels: padding rows, and nothing known of the host."""

from __future__ import annotations

import numpy as np
import torch
from support.decode_scene import places, scene
from support.graph_recorders import RerunRecorder

from lightserve.kernels.select import make_kernels


@torch.inference_mode()
def test_padded_decodes_give_the_logits_of_plain_ones() -> None:
    ours, reference = scene(make_kernels("triton", batch_invariant=False)), scene()
    graphs = ours.graphs(RerunRecorder(), sizes=(4,))
    graphs.capture()
    rng = np.random.default_rng(0)
    for num_rows in (3, 4, 1):
        rows, positions = places(rng, num_rows)
        logits = graphs.logits(rows, positions)
        assert logits is not None
        torch.testing.assert_close(logits, reference.eager(rows, positions), rtol=1e-4, atol=1e-4)
