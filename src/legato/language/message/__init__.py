"""Tokens of an answer to the parts of a message: content, reasoning and tool calls."""
