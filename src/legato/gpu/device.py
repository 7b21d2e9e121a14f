"""The interface of a GPU beyond PyTorch's tensors: pinned memory, streams, events and graphs.

Other modules use the protocol only. Tests have an implementation of it that runs on the host.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Memory(NamedTuple):
    """Memory of the device, in bytes.

    Attributes:
        free: not in use by any process.
        total: size of the memory.
        peak: most that this process has had from PyTorch since `Device.forget_peak`.
    """

    free: int
    total: int
    peak: int


class Event(Protocol):
    """A point in a stream's work; it is passed once all earlier work is done."""

    def record(self) -> None:
        """Record the point after all work launched on the stream so far."""
        ...

    def wait(self) -> None:
        """Block the host until the point is passed."""
        ...

    def seconds_since(self, earlier: "Event") -> float:
        """Return the seconds between two passed points, by the device's clock."""
        ...


class Device(Protocol):
    """One GPU. Only `Event.wait` and `synchronize` block the host.

    Attributes:
        torch_device: device of its tensors.
        num_processors: streaming multiprocessors.
    """

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def num_processors(self) -> int: ...

    @property
    def memory(self) -> Memory: ...

    def forget_peak(self) -> None:
        """Restart `Memory.peak` at the memory in use now, and release cached memory."""
        ...

    def host_tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized host memory that the device can copy by itself."""
        ...

    def upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """Return a copy on the device, ready for the work that the stream gets next.

        The caller may change `values` at once.
        """
        ...

    def download(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host, ready once an `Event` recorded after this is passed."""
        ...

    def event(self) -> Event: ...

    def synchronize(self) -> None:
        """Block the host until all work of the device is done."""
        ...

    def beside(self, *, follows: bool) -> AbstractContextManager[None]:
        """Launch the work within on a second stream: copies, while the first stream computes.

        Args:
            follows: whether it waits for the work that the first stream has so far.
        """
        ...

    def join(self) -> None:
        """Make the first stream wait for the work that the second has so far."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` launches, without running it; each call of the result runs it.

        Graphs share the memory of intermediate results. So only one graph may run at a time, and
        results must be written to tensors that exist before.
        """
        ...


def gpu_names() -> list[str]:
    """Return the names of all GPUs that PyTorch sees, in their order."""
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
    """See `Device`.

    A device with an index becomes the process's current one, since Triton uses the current device.
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
        # PyTorch keeps pinned memory until copies from it are done, then reuses it.
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

    def join(self) -> None:
        torch.cuda.current_stream(self.torch_device).wait_stream(self._copies)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            work()
        return graph.replay
