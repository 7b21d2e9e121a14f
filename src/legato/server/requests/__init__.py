"""Parses request bodies, strictly and within bounds, and makes prompts of them."""
