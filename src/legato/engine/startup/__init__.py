"""From a configuration to an engine that can run: loading, and measuring step times."""
