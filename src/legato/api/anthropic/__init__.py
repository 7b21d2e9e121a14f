"""Anthropic's Messages API: the body of a request beside its answer."""
