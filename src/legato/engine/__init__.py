"""Floor 5: the loop, the process it lives in, and the front end that feeds it."""
