"""Typed, bounded queues between processes: one contract, ZeroMQ and in-memory versions."""
