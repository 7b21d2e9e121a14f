"""Tokenizers of checkpoints, and where they come from."""
