"""Seeded fuzzers of requests, clients and checkpoints. `python -m tests.fuzz` runs them for long.

Each takes a `random.Random`, so that a seed tells what to run again.
"""
