"""Files and batches that outlive every process: the store, and the process that works it off."""
