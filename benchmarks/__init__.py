"""Measurements of Legato, each run by one command; see docs/contributing/benchmarks.md."""
