"""Executors of a model that is divided among ranks, which go in lockstep."""
