"""What `legato demo` shows: the same traffic under four policies, step by step."""
