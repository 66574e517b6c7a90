"""The HTTP process: validate, tokenise, stream. No scheduling state, no torch."""
