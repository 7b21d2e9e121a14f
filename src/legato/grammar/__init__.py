"""Floor 4: forms that outputs must have: from what a request says to which tokens may come next."""
