"""Does overload keep its word? See `python -m benchmarks overload --help`."""
