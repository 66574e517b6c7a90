"""CPU kernels in torch operations."""
