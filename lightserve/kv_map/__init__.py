"""A picture of a server's KV pool: `lightserve kv-map`."""
