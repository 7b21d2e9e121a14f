"""Processes that each have a part of the model."""
