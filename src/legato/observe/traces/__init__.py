"""Writes records to trace files and spans, and explains them."""
