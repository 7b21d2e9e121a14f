"""Floor 8: the `legato` command."""
