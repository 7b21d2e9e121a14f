"""Floor 6: what a GPU alone has: its kernels, its graphs, and the executor that runs on them."""
