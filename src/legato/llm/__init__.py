"""Floor 7: the Python API: engines within a program of the caller's own."""
