"""Floor 10: workloads, load over HTTP, capacity search, the tuner, the demo, and reports."""
