"""Floor 4: moves blocks of the KV cache from one engine to another."""
