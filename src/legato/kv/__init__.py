"""Floor 1: the block pool, the prefix tree and block tables. Never imports torch."""
