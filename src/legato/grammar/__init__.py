"""Floor 2: a compiled grammar, which names the tokens that may come next."""
