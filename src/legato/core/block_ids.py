"""Block ids side by side, in 32 bits each.

A step names the blocks of all that run. As tuples, each of their numbers would be looked at by the
garbage collector, and turned into a number of 32 bits for the device.
"""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    BlockIds = array[int]
else:  # Python 3.11's cannot say of what it is
    BlockIds = array


def block_array(block_ids: Iterable[int] = ()) -> BlockIds:
    return array("i", block_ids)
