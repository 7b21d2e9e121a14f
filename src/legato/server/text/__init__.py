"""Processes that parse bodies, so that no client's text blocks another's stream."""
