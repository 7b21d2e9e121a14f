"""Floor 2: a compiled grammar, from the tokens so far to those that may come next."""
