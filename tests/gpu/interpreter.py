"""Makes Triton's interpreter faster: it works out once what it would again and again.

Patching the language takes a third of its time: it is done for a launch, and for each call of a
function in one, though only the first has an effect. Types of blocks take a third of the rest:
each operation makes several, with names and shapes. Half of what is left goes into a common type
and shape of two operands; NumPy repeats the smaller one itself.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterOptions, interpreter_builder

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
            _block_types.clear()

    return launched


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def found_before(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    return found_before


_block_types: dict[tuple[int, tuple[int, ...]], tl.block_type] = {}
"""Types of the launch that runs, by the id of their elements' type, which they keep, and shape."""


def _known_block_type(
    cls: type[tl.block_type], element_type: tl.dtype, shape: Sequence[int | tl.constexpr]
) -> tl.block_type:
    sizes = tuple([getattr(size, "value", size) for size in shape])
    key = (id(element_type), sizes)
    if key not in _block_types:
        made = object.__new__(cls)
        _init_block_type(made, element_type, shape)
        _init_tensor(example := object.__new__(tl.tensor), None, made)
        made.of_tensors, made.sizes = vars(example), sizes
        _block_types[key] = made
    return _block_types[key]


def _init_known_tensor(tensor: tl.tensor, handle: Any, type: tl.dtype) -> None:
    if isinstance(type, tl.block_type):
        vars(tensor).update(type.of_tensors, handle=handle)
    else:
        _init_tensor(tensor, handle, type)


def _broadcast(semantic: TritonSemantic, one: tl.tensor, other: tl.tensor) -> Any:
    sizes = getattr(one.type, "sizes", None)
    if sizes is not None and sizes == getattr(other.type, "sizes", None):
        return one, other
    return _broadcast_any(semantic, one, other)


class _Elementwise(TritonSemantic):
    """Operands are given a common type; the operation itself repeats the smaller one."""

    def broadcast_impl_value(self, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        sizes = _common_sizes(*(getattr(one.type, "sizes", ()) for one in (lhs, rhs)))
        return _labeled(lhs, sizes), _labeled(rhs, sizes)


@cache
def _common_sizes(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return np.broadcast_shapes(one, other)


def _labeled(tensor: tl.tensor, sizes: tuple[int, ...]) -> tl.tensor:
    if getattr(tensor.type, "sizes", ()) == sizes:
        return tensor
    return tl.tensor(tensor.handle, tl.block_type(tensor.dtype, [*sizes]))


def _common_type(
    _: TritonSemantic, lhs: Any, rhs: Any, *flags: bool, **more: bool
) -> tuple[tl.tensor, tl.tensor]:
    """Args: flags, more: of pointers (the first two), and of divisions, which may want float32."""
    if len(flags) <= 2 and not more and isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
        kind = lhs.dtype
        if kind is rhs.dtype and not kind.is_ptr():
            return _elementwise.broadcast_impl_value(lhs, rhs)
    return _common_type_of_any(_elementwise, lhs, rhs, *flags, **more)


def _by_names(find: Callable[..., Any]) -> Callable[..., Any]:
    found: dict[Any, Any] = {}

    def found_before(_: Any, one: tl.dtype, is_1: bool, other: tl.dtype, *flags: bool) -> Any:
        key = one.name, is_1, other.name, flags
        if key not in found:
            found[key] = find(_, one, is_1, other, *flags)
        return found[key]

    return found_before


def _identity_first(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda one, other: one is other or equal(one, other)


_init_block_type, _init_tensor = tl.block_type.__init__, tl.tensor.__init__
_broadcast_any = TritonSemantic.broadcast_impl_value
_common_type_of_any = TritonSemantic.binary_op_type_checking_impl
_elementwise = _Elementwise(interpreter_builder)

if os.environ.get("TRITON_INTERPRET") == "1":
    tl.block_type.__new__ = _known_block_type
    tl.block_type.__init__ = lambda *_: None
    tl.tensor.__init__ = _init_known_tensor
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.binary_op_type_checking_impl = _common_type
    TritonSemantic.computation_type_impl = _by_names(TritonSemantic.computation_type_impl)
    for kind in (tl.dtype, tl.block_type):
        kind.__eq__ = _identity_first(kind.__eq__)
    # It computes each sum and product of integers twice, and never looks at the second.
    assert not InterpreterOptions.debug
    interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)

interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
GridExecutor.__call__ = _restoring(GridExecutor.__call__)
