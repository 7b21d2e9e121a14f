"""Floor 10: the `legato` command."""
