"""Floor 5: blocks of the KV cache on their way from one engine to another."""
