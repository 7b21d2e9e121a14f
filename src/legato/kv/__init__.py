"""Floor 1: the block pool and each request's block table. Never imports torch."""
