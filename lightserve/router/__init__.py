"""All decisions and all book-keeping: queues, KV slots, the planner. No torch."""
