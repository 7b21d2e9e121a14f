"""Sends a workload to a server, and records the answers."""
