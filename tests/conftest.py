"""What must be so before any test module is imported."""

from __future__ import annotations

import os
import signal

import torch

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter, which must be known before triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# Under nohup and in background jobs these are ignored, and servers that tests start would inherit
# that and, as they should, go on ignoring them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
