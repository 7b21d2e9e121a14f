"""What speculation is worth to streams, beside none and beside peers."""
