"""Conversations to prompts, by the chat templates of models."""
