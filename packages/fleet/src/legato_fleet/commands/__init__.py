"""Floor 11: the `legato` command."""
