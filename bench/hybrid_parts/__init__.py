"""Parts of `bench/hybrid.py`."""
