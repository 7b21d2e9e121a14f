"""Floor 5: the `legato` command."""
