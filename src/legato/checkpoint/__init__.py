"""Floor 3: checkpoints on disk: files, formats, defaults, and loading them into models."""
