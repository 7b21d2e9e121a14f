"""Fixtures of tiny checkpoints."""

from tests.model.conftest import save_tiny, smollm2_path

__all__ = ["save_tiny", "smollm2_path"]
