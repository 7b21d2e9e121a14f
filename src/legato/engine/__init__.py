"""Floor 7: the loop, the process it lives in, and the front end that feeds it."""
