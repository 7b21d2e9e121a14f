"""Turns records into figures, tables and plots."""
