"""Triton kernels over the token-level pool; on a CPU they run in Triton's interpreter, for tests.

Imported only where they are chosen: `triton` is an optional dependency.
"""
