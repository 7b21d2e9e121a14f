from collections.abc import Iterator

import pytest

from legato.kv.manager import KVCacheManager
from tests.kv.conservation import check_blocks

BLOCK_SIZE = 4


@pytest.fixture
def kv() -> Iterator[KVCacheManager]:
    """Sixteen blocks; in the end, none is lost or in two places."""
    manager = KVCacheManager(num_blocks=16, block_size=BLOCK_SIZE)
    yield manager
    check_blocks(manager)
