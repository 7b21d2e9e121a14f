"""Floor 5: runs a step plan: on torch, or simulated on a virtual clock."""
