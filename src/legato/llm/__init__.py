"""Floor 8: the Python API: engines within a program of the caller's own."""
