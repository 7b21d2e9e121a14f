"""The engine's side towards callers: takes requests, returns text."""
