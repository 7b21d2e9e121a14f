"""Floor 4: the loop, the process it lives in, and the front end that feeds it."""
