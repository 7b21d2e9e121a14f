"""Kernels on whatever is there: compiled on a GPU, in Triton's interpreter elsewhere."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before anything imports triton.
    assert "triton" not in sys.modules, "triton was imported before it was told to interpret"
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords and item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))
