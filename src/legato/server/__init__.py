"""Floor 5: the OpenAI-compatible HTTP API."""
