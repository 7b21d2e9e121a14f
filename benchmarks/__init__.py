"""Measurements of Legato: `python -m benchmarks --list` lists them; see docs/benchmarks.md."""
