"""What does a token cost outside the model? See `python -m benchmarks token_cost --help`."""
