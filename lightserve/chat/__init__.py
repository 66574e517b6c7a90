"""A terminal chat with any server that speaks OpenAI's HTTP API: `lightserve chat`."""
