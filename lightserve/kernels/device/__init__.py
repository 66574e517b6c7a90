"""torch's own operations on any device: what `--attention-backend torch` is on a GPU."""
