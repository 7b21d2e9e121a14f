"""Floor 0: the types every other room speaks in. Imports nothing of Legato."""
