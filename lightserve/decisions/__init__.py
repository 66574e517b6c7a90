"""The decision log: what went into a router's core and what it decided, to be replayed."""
