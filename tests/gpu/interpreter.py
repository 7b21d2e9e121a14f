"""Makes Triton's interpreter faster: it works out once what it would again and again.

Patching the language takes a third of its time: it is done for a launch, and for each call of a
function in one, though only the first has an effect.
"""

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor

Patch = Callable[[Callable[..., Any]], Any]

_patched: set[int] = set()
"""Ids of the language's modules that have been patched for the launch that runs."""


def _once_a_launch(patch: Patch) -> Patch:
    def patched(function: Callable[..., Any]) -> Any:
        modules = {id(one) for one in (tl, tl.core) if one in function.__globals__.values()}
        if modules <= _patched:
            return None  # only a launch restores what was patched, and it is the first to patch
        _patched.update(modules)
        return patch(function)

    return patched


def _restoring(launch: Callable[..., None]) -> Callable[..., None]:
    def launched(*args: Any, **kwargs: Any) -> None:
        try:
            launch(*args, **kwargs)
        finally:
            _patched.clear()

    return launched


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def found_before(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    return found_before


interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
GridExecutor.__call__ = _restoring(GridExecutor.__call__)
