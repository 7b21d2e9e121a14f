"""Floor 0: the types that all other rooms share. Imports nothing of Legato."""
