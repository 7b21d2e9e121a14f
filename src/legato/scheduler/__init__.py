"""Floor 5: what runs in the next step. Pure Python, no torch, no clock of its own."""
