"""Copies between host and device that make the host wait."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu.host_twin import HostTwin

_COPY = torch.ops.aten.copy_.default


class OnlyAsynchronousCopies(TorchDispatchMode):
    """Raises where a `HostTwin` on the meta device stands for a GPU that the host waits for.

    The host copies by itself if its memory is pageable, and waits for the device if the copy is
    blocking.
    """

    def __init__(self, device: HostTwin) -> None:
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
        result = func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        if len({tensor.device for tensor in tensors}) > 1:
            is_asynchronous = func is _COPY and (kwargs.get("non_blocking") or args[2:] == (True,))
            assert is_asynchronous, f"{func} makes the host wait"
            on_host = [tensor for tensor in tensors if not tensor.is_meta]
            assert all(map(self._device.is_pinned, on_host)), f"{func} copies pageable memory"
        return result
