"""Floor 4: the OpenAI-compatible HTTP API."""
