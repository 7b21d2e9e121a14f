"""Floor 10: several engines served as one, on Ray Serve."""
