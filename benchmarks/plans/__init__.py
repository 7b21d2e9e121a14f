"""What the scheduler plans, step by step, for comparison with another version of it."""
