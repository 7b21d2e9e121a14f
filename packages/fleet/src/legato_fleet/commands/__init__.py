"""The `legato fleet` command."""
