"""Floor 1: guesses of what comes next, and how likely they are. Never imports torch."""
