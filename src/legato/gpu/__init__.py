"""Floor 5: kernels and graphs for GPUs, and the executor that runs on them."""
