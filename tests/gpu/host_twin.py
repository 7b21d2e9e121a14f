"""A GPU that is not there: its logic on the host's tensors, with graphs that are recordings.

There can be several, in a thread each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from legato.gpu.device import Event, Memory
from legato.model.process_group import ProcessGroup

Call = Callable[[], object]

on_the_twin = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are interpreted only where there is no GPU"
)


class TwinEvent:
    def __init__(self) -> None:
        self._passed_s: float | None = None

    def record(self) -> None:
        self._passed_s = time.perf_counter()

    def wait(self) -> None:
        """All is done when it is asked for."""

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, TwinEvent)
        assert self._passed_s is not None
        assert earlier._passed_s is not None
        return self._passed_s - earlier._passed_s


class HostTwin:
    """A `Device` on the CPU. On `meta` it computes nothing, so that any look at a value raises."""

    num_processors = 1  # few items: each takes the interpreter a while

    def __init__(self, torch_device: str = "cpu") -> None:
        self.torch_device = torch.device(torch_device)
        self._pinned: list[torch.Tensor] = []

    def is_pinned(self, values: torch.Tensor) -> bool:
        """Whether they lie in a `host_tensor`."""
        places = [tensor.untyped_storage().data_ptr() for tensor in self._pinned]
        return values.untyped_storage().data_ptr() in places

    @property
    def memory(self) -> Memory:
        return Memory(free=2**30, total=2**31, peak=2**28)

    def forget_peak(self) -> None:
        pass

    def host_tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory full of numbers that no program wrote."""
        self._pinned.append(torch.full(shape, 77, dtype=dtype))
        return self._pinned[-1]

    def upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        host = torch.from_numpy(values.copy())
        if self.torch_device.type == "meta":
            return torch.empty(host.shape, dtype=host.dtype, device="meta")
        return host

    def download(self, values: torch.Tensor) -> torch.Tensor:
        return values if values.is_meta else values.clone()

    def enqueue(self, work: Call) -> None:
        """What a kernel would do; see `DeferredTwin`."""
        work()

    def event(self) -> TwinEvent:
        return TwinEvent()

    def synchronize(self) -> None:
        pass

    @contextmanager
    def beside(self, *, follows: bool) -> Iterator[None]:
        del follows
        yield

    def join(self) -> None:
        pass

    def capture(self, work: Call) -> Call:
        recording = Recording()
        with recording:
            work()
        return recording.replay


class Recording(TorchDispatchMode):
    """What a thread asked of PyTorch, Triton and other ranks, with the very tensors.

    As a graph, it knows no others: a replay writes to the addresses that the recorded calls wrote
    to, even if Python would take others now.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Call] = []
        self._is_inside = False  # a call that is recorded as one

    def __enter__(self) -> Recording:
        _thread.recording = self
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _thread.recording = None

    def note(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        self._is_inside = True
        try:
            result = call(*args, **kwargs)
        finally:
            self._is_inside = False
        self._calls.append(lambda: _again(call, args, kwargs, result))
        return result

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_inside:
            self._calls.append(lambda: _again(func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for call in self._calls:
            call()


def _again(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> None:
    """Have the same tensors hold what comes of it now."""
    outputs = func(*args, **kwargs)
    if result is None:
        return
    pairs = (
        zip(outputs, result, strict=True)
        if isinstance(result, tuple | list)
        else [(outputs, result)]
    )
    for new, kept in pairs:
        if isinstance(new, torch.Tensor) and new.data_ptr() != kept.data_ptr():
            kept.copy_(new)


_thread = threading.local()
_interpreter = threading.RLock()
"""It keeps what it is at where all threads see it."""


def _recorded(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, noted by the `Recording` that is being made."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        recording = getattr(_thread, "recording", None)
        if recording is None:
            return call(*args, **kwargs)
        return recording.note(call, args, kwargs)

    return noted


def _alone(launch: Callable[..., None]) -> Callable[..., None]:
    def launch_alone(*args: Any, **kwargs: Any) -> None:
        with _interpreter:
            launch(*args, **kwargs)

    return launch_alone


GridExecutor.__call__ = _recorded(_alone(GridExecutor.__call__))
ProcessGroup.sum = _recorded(ProcessGroup.sum)  # type: ignore[method-assign]
ProcessGroup.gather = _recorded(ProcessGroup.gather)  # type: ignore[method-assign]


def no_launches(monkeypatch: Any) -> None:
    """Have kernels do nothing, for tensors that hold nothing."""
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
