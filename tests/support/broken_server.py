"""`lightserve` whose workers have a kernel that is wrong: `broken_server.py FAULT serve …`.

The same file is the command of its children, as `broken_server.py FAULT NAME PARENT_PID`.
"""

from __future__ import annotations

import sys
from functools import partial

from lightserve import child
from lightserve.supervisor import loop

if __name__ == "__main__":
    fault = sys.argv.pop(1)
    if sys.argv[1] == "serve":
        from lightserve.cli.main import main

        loop.serve = partial(loop.serve, command=[sys.executable, __file__, fault])  # type: ignore[assignment]
        main()
    elif sys.argv[1].startswith("worker"):
        from lightserve.worker import build
        from support.broken_kernels import FAULTS

        build.make_kernels = lambda *_, **__: FAULTS[fault]()  # type: ignore[assignment]
    child.main()
