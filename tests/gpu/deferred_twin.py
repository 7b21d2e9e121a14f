"""A GPU that is not there and that is never in a hurry: work runs when the host waits for it.

Each stream is a queue. Waiting for an event runs its stream up to the event, and of the other
stream only what that needs. So work that nothing waits for has not been done, and memory that the
host changes too early is read too late: a race that a GPU has now and then fails here always.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

from legato.core.plan import BlockMove, StepPlan
from legato.gpu.device import Event
from legato.gpu.gpu_executor import GpuExecutor
from tests.gpu.host_twin import Call, HostTwin

_launching = threading.local()


class Stream:
    """Work in the order in which it was launched."""

    def __init__(self) -> None:
        self.num_launched = 0
        self.num_done = 0
        self.errors: dict[int, Exception] = {}  # key the number of the work that raised
        self._work: deque[Call] = deque()

    def launch(self, work: Call) -> None:
        self._work.append(work)
        self.num_launched += 1

    def run_until(self, count: int) -> None:
        """Do the first `count` pieces of work that there ever were."""
        while self.num_done < count:
            work = self._work.popleft()
            self.num_done += 1
            try:
                with _disable_current_modes(), torch.inference_mode():
                    work()
            except Exception as error:
                self.errors[self.num_done] = error

    def raise_until(self, count: int) -> None:
        """As a device does, raise what went wrong when the host next waits."""
        for number in sorted(self.errors):
            if number <= count:
                raise self.errors.pop(number)


class DeferredEvent:
    def __init__(self, device: DeferredTwin) -> None:
        self._device = device
        self._stream: Stream | None = None
        self._number = 0
        self._passed_s: float | None = None

    def record(self) -> None:
        self._stream, self._passed_s = self._device.stream, None
        self._stream.launch(self._pass)
        self._number = self._stream.num_launched

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.run_until(self._number)
            self._stream.raise_until(self._number)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, DeferredEvent)
        assert self._passed_s is not None
        assert earlier._passed_s is not None
        return self._passed_s - earlier._passed_s

    def _pass(self) -> None:
        self._passed_s = time.perf_counter()


class DeferredTwin(HostTwin):
    """A `Device` whose work waits; all that an executor does while it launches is such work.

    Args:
        copies_early: run what is on the second stream as soon as it may, and not as late.
    """

    def __init__(self, *, copies_early: bool = False) -> None:
        super().__init__()
        self.main = self.stream = Stream()
        self._copies = Stream()
        self._copies_early = copies_early

    @contextmanager
    def launching(self) -> Iterator[None]:
        _launching.device = self
        try:
            with _Queueing(self):
                yield
        finally:
            _launching.device = None

    def enqueue(self, work: Call) -> None:
        if getattr(_launching, "device", None) is self:
            self.stream.launch(work)
        else:
            work()

    def upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        with _disable_current_modes():
            host = torch.from_numpy(values.copy())
            there = _unwritten(host)
        self.enqueue(partial(there.copy_, host))
        return there

    def download(self, values: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            host = _unwritten(values)
        self.enqueue(partial(host.copy_, values))
        return host

    def event(self) -> DeferredEvent:  # type: ignore[override]
        return DeferredEvent(self)

    def synchronize(self) -> None:
        for stream in (self.main, self._copies):
            stream.run_until(stream.num_launched)
            stream.raise_until(stream.num_launched)

    @contextmanager
    def beside(self, *, follows: bool) -> Iterator[None]:
        copies = self._copies
        if follows:
            copies.launch(partial(self.main.run_until, self.main.num_launched))
        self.stream = copies
        try:
            yield
        finally:
            self.stream = self.main
        if self._copies_early:
            copies.run_until(copies.num_launched)

    def join(self) -> None:
        self.main.launch(partial(self._copies.run_until, self._copies.num_launched))

    def capture(self, work: Call) -> Call:
        replay = super().capture(work)
        return lambda: self.enqueue(replay)


class DeferredExecutor(GpuExecutor):
    """Its launches wait on a `DeferredTwin`."""

    def move(self, moves: Sequence[BlockMove]) -> None:
        with self._device.launching():  # type: ignore[attr-defined]
            super().move(moves)

    def submit(self, plan: StepPlan) -> None:
        with self._device.launching():  # type: ignore[attr-defined]
            super().submit(plan)


class _Queueing(TorchDispatchMode):
    """Launches PyTorch's operations instead of running them. Results have no values meanwhile."""

    def __init__(self, device: DeferredTwin) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        returns = [one.alias_info for one in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        has_inputs = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs)))
        if is_view or not has_inputs:
            return func(*args, **kwargs)
        call = partial(func, *args, **kwargs)
        if func._schema.is_mutable:
            self._device.enqueue(call)
            written = [
                kwargs[one.name] if one.name in kwargs else args[i]
                for i, one in enumerate(func._schema.arguments)
                if one.alias_info is not None and one.alias_info.is_write
            ]
            return written[0] if len(returns) == 1 else tuple(written[: len(returns)])
        shapes = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        results = tree_map(_unwritten, shapes)
        self._device.enqueue(partial(_fill, results, call))
        return results


def _fill(results: Any, call: Callable[[], Any]) -> None:
    for kept, new in zip(tree_leaves(results), tree_leaves(call()), strict=True):
        kept.copy_(new)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _unwritten(like: Any) -> Any:
    """Memory on the host as another tensor has, with contents that no operation wrote."""
    if not isinstance(like, torch.Tensor):
        return like
    values = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
    return values.fill_(torch.nan if like.is_floating_point() else 77)


def _queued(call: Callable[..., None]) -> Callable[..., None]:
    def launch(*args: Any, **kwargs: Any) -> None:
        device = getattr(_launching, "device", None)
        if device is None:
            call(*args, **kwargs)
        else:
            device.enqueue(partial(_outside, call, *args, **kwargs))

    return launch


def _outside(call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Kernels that run later are not launched once more."""
    device, _launching.device = getattr(_launching, "device", None), None
    try:
        call(*args, **kwargs)
    finally:
        _launching.device = device


GridExecutor.__call__ = _queued(GridExecutor.__call__)
