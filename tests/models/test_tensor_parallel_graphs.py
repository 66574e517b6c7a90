"""Graphs with collectives in them, over two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SIZE, TIMEOUT_S = 2, 600.0


def test_ranks_record_and_replay_together(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(root.parent), str(root))),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "support.tp_graphs"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(SIZE), str(tmp_path / "store")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * SIZE, "\n".join(errors)
