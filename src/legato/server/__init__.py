"""Floor 8: the OpenAI-compatible HTTP API."""
