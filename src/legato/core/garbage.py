"""Garbage collection in a process that loads many objects and keeps them."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside; exempt all objects that exist at the end.

    Imports and loading make hundreds of thousands of objects that stay. The collector would visit
    all of them several times during the start, which takes a sixth of it, and again every few
    seconds after. Even one visit takes a tenth of a second, to free a few thousand objects.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
