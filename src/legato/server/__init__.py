"""Floor 9: the OpenAI-compatible HTTP API."""
