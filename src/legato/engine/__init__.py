"""Floor 6: tokens to tokens: the loop, the process it lives in, and the client of both."""
