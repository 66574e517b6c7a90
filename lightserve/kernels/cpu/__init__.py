"""Kernels for CPUs, made of torch operations."""
