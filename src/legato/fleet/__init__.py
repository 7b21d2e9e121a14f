"""Floor 7: several engines that are served as one, on Ray Serve."""
