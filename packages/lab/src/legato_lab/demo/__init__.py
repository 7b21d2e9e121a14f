"""`legato demo`: the same traffic under four policies, step by step."""
