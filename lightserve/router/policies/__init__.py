"""Who advances in a step: one short file per policy."""
