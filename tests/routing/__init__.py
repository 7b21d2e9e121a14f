"""Routing is pure: replicas are states that it is told, and time is a number."""
