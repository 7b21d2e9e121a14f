"""Floor 1: packed decoder models, their layers, and loading of checkpoints and tokenizers."""
