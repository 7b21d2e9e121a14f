"""Sending it, and noting what comes back."""
