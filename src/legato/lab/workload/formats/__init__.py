"""Formats of workload files, one a module: each says which rows a file has and what a row asks."""
