"""The engine's side towards callers: takes requests, hands out tokens."""
