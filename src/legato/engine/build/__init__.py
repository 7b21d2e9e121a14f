"""Builds an engine from its configuration, and runs it in a process of its own."""
