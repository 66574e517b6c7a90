"""The parts of bench/abuse.py: one file per kind of abuse."""
