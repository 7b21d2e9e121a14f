"""Floor 2: metrics."""
