"""One file a part; each has `run`, which measures and returns figures."""
