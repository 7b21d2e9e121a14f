"""Workloads: the requests for a server, and their arrivals."""
