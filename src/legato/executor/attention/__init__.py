"""Attention backends: each attends over the packed batch of one step, in its own cache layout."""
