"""Sends a workload to a server, and notes what comes back."""
