"""Floor 4: chooses the work of the next step. Pure Python, no torch, no clock of its own."""
