"""Ranks: processes that each compute a part of the model."""
