"""Floor 3: blocks of the KV cache on their way from one engine to another."""
