"""The real RouterCore under a virtual clock, with a simulated worker."""
