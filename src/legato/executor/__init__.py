"""Floor 4: runs step plans, on PyTorch or simulated on a virtual clock."""
