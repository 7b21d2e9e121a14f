"""What all benchmarks share: flags, servers, rounds, and what is written of a run."""
