"""Token ids side by side, in 32 bits each.

A prompt of 100,000 tokens goes from process to process and into its blocks' keys as memory. As a
tuple, each of its numbers would be looked at, again and again, while all streams wait.
"""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    TokenIds = array[int]
else:  # Python 3.11's cannot say of what it is
    TokenIds = array


def token_array(token_ids: Iterable[int]) -> TokenIds:
    """Raises OverflowError where one has no 32 bits."""
    return array("i", token_ids)
