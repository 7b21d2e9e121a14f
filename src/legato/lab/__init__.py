"""Floor 12: measuring: workloads, load over HTTP, capacity, the tuner, the demo, and reports."""
