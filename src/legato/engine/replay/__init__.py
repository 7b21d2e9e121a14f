"""Replays of traces: what would have kept a token on time."""
