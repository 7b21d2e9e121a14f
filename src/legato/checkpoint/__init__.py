"""Floor 2: checkpoints on disk: their files, formats and defaults, and loading models of them."""
