"""Chat template, encoding, incremental detokenisation. No torch, no transformers."""
