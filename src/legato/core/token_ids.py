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


def num_common_tokens(one: TokenIds, other: TokenIds, most: int) -> int:
    """Return how many tokens two rows begin with alike, at most `most`; neither is shorter."""
    low, high = 0, most
    if one[:most] == other[:most]:
        return most
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def token_array(token_ids: Iterable[int]) -> TokenIds:
    """Return the ids as an array; raise OverflowError if one does not fit into 32 bits."""
    return array("i", token_ids)
