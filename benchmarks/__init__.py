"""Measurements of Legato, each run by one command; see docs/benchmarks.md."""
