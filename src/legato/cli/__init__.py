"""Floor 7: the `legato` command."""
