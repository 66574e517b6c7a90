#!/usr/bin/env python
"""`lightserve bench` from a checkout: `python bench/load_test.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightserve.cli.main import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
