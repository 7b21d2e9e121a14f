"""Fixtures of tiny checkpoints."""

from tests.model.conftest import save_tiny

__all__ = ["save_tiny"]
