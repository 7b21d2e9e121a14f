"""Python's garbage collector, of a process that loads much and then keeps it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing meanwhile, and never look at what there is in the end.

    To import and to load makes hundreds of thousands of objects that stay. The collector would look
    at all of them several times before they are there, which takes a sixth of the start, and again
    every few seconds after. Even to look once takes a tenth of a second, for a few thousand objects
    that could go.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
