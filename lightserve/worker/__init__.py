"""Executes plans: one process per tensor-parallel rank. It decides nothing."""
