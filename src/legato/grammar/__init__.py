"""Floor 4: grammars of outputs: from a request's form to the tokens that may come next."""
