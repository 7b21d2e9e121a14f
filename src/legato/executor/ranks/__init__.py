"""Executors of a model that is divided among ranks, which run in lockstep."""
