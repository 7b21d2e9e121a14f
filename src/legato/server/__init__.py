"""Floor 6: the OpenAI-compatible HTTP API."""
