"""Who may start, by memory: one short file per rule."""
