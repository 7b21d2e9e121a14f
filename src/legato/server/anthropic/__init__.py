"""Anthropic's Messages API: what its clients send and read, over the same generation."""
