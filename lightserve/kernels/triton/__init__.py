"""Triton kernels over the token-level pool; on a CPU they run in Triton's interpreter, for tests.

Its modules are imported only where they are chosen: `triton` is an optional dependency.
"""

OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)
"""Versions that the kernels have been compiled and tried with; pyproject.toml asks for the same."""
