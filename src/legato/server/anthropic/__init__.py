"""Anthropic's Messages API: its requests and answers, over the same generation as OpenAI's."""
