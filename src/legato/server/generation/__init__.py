"""Runs one HTTP request's generation, in the format of its endpoint."""
