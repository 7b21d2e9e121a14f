"""Floor 5: moves blocks of the KV cache from one engine to another."""
