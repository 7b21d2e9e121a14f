"""Block ids as arrays of 32-bit integers.

A step names the blocks of all running requests. In tuples, each id would be visited by the garbage
collector, and converted to 32 bits for the device.
"""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    BlockIds = array[int]
else:  # Python 3.11's array takes no type argument
    BlockIds = array


def block_array(block_ids: Iterable[int] = ()) -> BlockIds:
    return array("i", block_ids)
