"""Floor 12: what measures: workloads, load over HTTP, capacity, the tuner, the demo, and reports."""
