"""Floor 6: the `legato` command."""
