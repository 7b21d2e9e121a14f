"""Checkpoints of the default model in the formats in which models are published."""
