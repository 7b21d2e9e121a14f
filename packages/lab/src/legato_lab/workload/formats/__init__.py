"""Formats of workload files, one a module: each defines a file's rows, and a row's requests."""
