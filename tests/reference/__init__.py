"""Reference implementations, one module per op stem, that share no code with the package."""
