"""What several tests share: random small models and the comparison with transformers."""
