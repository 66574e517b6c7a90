"""What is measured and checked by hand: `python -m bench.router.steps`, from the repository's root.

Results are in docs/results/. What benchmarks share with the tests is in tests/support/.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
