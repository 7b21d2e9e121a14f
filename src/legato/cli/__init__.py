"""Floor 9: the `legato` command."""
