"""Floor 9: several engines served as one, on Ray Serve."""
