"""Kernels, compiled on a GPU and in Triton's interpreter elsewhere."""

import os

import pytest
import torch

from tests.gpu import interpreter

__all__ = ["interpreter"]

assert torch.cuda.is_available() == (os.environ["TRITON_INTERPRET"] == "0"), (
    "set TRITON_INTERPRET to 1 where PyTorch finds no GPU, to 0 where it does"
)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))
