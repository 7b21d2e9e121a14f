"""Floor 1: packed decoder models and their layers."""
