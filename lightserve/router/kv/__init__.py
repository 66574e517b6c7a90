"""Book-keeping of KV slots; the tensors live in the workers."""
