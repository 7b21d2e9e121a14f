"""Runs a workload on a virtual clock."""
