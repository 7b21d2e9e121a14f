"""What a GPU has that PyTorch's tensors do not show: pinned memory, streams, events and graphs.

The rest of the room sees the protocol alone. Tests have a twin of it that runs on the host.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Memory(NamedTuple):
    """Bytes on the device.

    Attributes:
        free: that nobody has.
        total: that there are.
        peak: most that this process has had from PyTorch since `Device.forget_peak`.
    """

    free: int
    total: int
    peak: int


class Event(Protocol):
    """A point in a stream's work, passed when all before it is done."""

    def record(self) -> None:
        """Put it behind what has been asked of the stream so far."""
        ...

    def wait(self) -> None:
        """Have the host wait until it is passed."""
        ...

    def seconds_since(self, earlier: "Event") -> float:
        """Between two points that are passed, by the device's clock."""
        ...


class Device(Protocol):
    """One GPU. Nothing but `Event.wait` and `synchronize` has the host wait for it.

    Attributes:
        torch_device: where its tensors are.
        num_processors: streaming multiprocessors, or compute units.
    """

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def num_processors(self) -> int: ...

    @property
    def memory(self) -> Memory: ...

    def forget_peak(self) -> None:
        """Begin `Memory.peak` anew, with no more taken than is in use."""
        ...

    def host_tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies from and to by itself; it holds nothing yet."""
        ...

    def upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """A copy on the device, there for what is asked of the stream next.

        `values` may be changed at once.
        """
        ...

    def download(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the host, there once an `Event` is passed that is recorded next."""
        ...

    def event(self) -> Event: ...

    def synchronize(self) -> None:
        """Have the host wait for all that the device was asked to do."""
        ...

    def beside(self, *, follows: bool) -> AbstractContextManager[None]:
        """Ask a second stream for what is asked within: copies, while the first one computes.

        Args:
            follows: whether it waits for what the first stream has been asked so far.
        """
        ...

    def lend(self, values: torch.Tensor) -> None:
        """Tell that the other stream works with a tensor, whose memory is to stay until then."""
        ...

    def join(self) -> None:
        """Have the first stream wait for what the second has been asked so far."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A graph of what `work` asks of the device, which is not done yet: each call has it done.

        Graphs share the memory of what they compute on the way, so that one at a time may run, and
        what is to be read afterwards is written where it stays.
        """
        ...


def gpu_names() -> list[str]:
    """Of all that PyTorch sees, by their numbers."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


class CudaEvent:
    """See `Event`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000.0


class CudaDevice:
    """See `Device`. PyTorch built for ROCm has the same names; that is untried.

    One that has a number is this process's from here on: Triton asks whichever is the current one.
    """

    def __init__(self, torch_device: torch.device) -> None:
        if torch_device.index is not None:
            torch.cuda.set_device(torch_device)
        self.torch_device = torch_device
        properties = torch.cuda.get_device_properties(torch_device)
        self.num_processors: int = properties.multi_processor_count
        self._copies = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
        self._graph_pool = torch.cuda.graph_pool_handle()

    @property
    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return Memory(free, total, torch.cuda.max_memory_reserved(self.torch_device))

    def forget_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def host_tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        # PyTorch keeps pinned memory until the copies from it are done, and then for the next.
        pinned = torch.from_numpy(values).pin_memory()
        return pinned.to(self.torch_device, non_blocking=True)

    def download(self, values: torch.Tensor) -> torch.Tensor:
        host = self.host_tensor(*values.shape, dtype=values.dtype)
        return host.copy_(values, non_blocking=True)

    def event(self) -> CudaEvent:
        return CudaEvent(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    @contextmanager
    def beside(self, *, follows: bool) -> Iterator[None]:
        if follows:
            self._copies.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._copies):
            yield

    def lend(self, values: torch.Tensor) -> None:
        for stream in (self._copies, torch.cuda.default_stream(self.torch_device)):
            values.record_stream(stream)

    def join(self) -> None:
        torch.cuda.current_stream(self.torch_device).wait_stream(self._copies)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            work()
        return graph.replay
