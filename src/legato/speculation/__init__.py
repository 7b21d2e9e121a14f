"""Guesses of what comes next, and how likely they are."""
