"""The trainer of the bundled model: text, tokenizer, weights, and a check of answers."""
