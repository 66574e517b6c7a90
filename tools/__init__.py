"""What is no product: trainer of the bundled model, makers of documentation pages."""
