"""The check of native kernels, which a process otherwise makes once."""

from collections.abc import Iterator

import pytest

from legato.executor.kernel_check import first_disagreement


@pytest.fixture
def checked_again() -> Iterator[None]:
    """A test that breaks the kernels sees them checked, and so do the tests after it."""
    first_disagreement.cache_clear()
    yield
    first_disagreement.cache_clear()
