"""Token ids as arrays of 32-bit integers.

A prompt of 100,000 tokens goes from process to process and into its blocks' keys as memory. In a
tuple, each number would be handled by itself, again and again, while all streams wait.
"""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    TokenIds = array[int]
else:  # Python 3.11's array takes no type argument
    TokenIds = array


def token_array(token_ids: Iterable[int]) -> TokenIds:
    """Return the ids as an array; raise OverflowError if one does not fit into 32 bits."""
    return array("i", token_ids)
