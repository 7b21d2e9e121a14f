"""Copies memory between processes with NIXL, over whatever joins them."""

import contextlib
import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from legato.core.errors import ConfigError
from legato.transfer.memory import CacheMemory, Spans
from legato.transfer.mover import ReadState, TransferError

_PACKAGES = ("nixl_cu12", "nixl_cu13")
"""NIXL as PyPI has it, for either version of CUDA; both work without."""

_STATES: dict[str, ReadState] = {"DONE": "done", "PROC": "running"}


def nixl_package() -> str | None:
    """The name of the NIXL that is installed."""
    return next((name for name in _PACKAGES if find_spec(name) is not None), None)


class NixlMover:
    """A NIXL agent with one region of host memory.

    Args:
        name: no other agent has it.
        is_local: whether it is to be reached from this machine alone.

    Raises:
        ConfigError: NIXL is missing, or does not start.
    """

    def __init__(self, name: str, memory: CacheMemory, *, is_local: bool) -> None:
        package = nixl_package()
        if package is None:
            raise ConfigError("--kv-role needs NIXL: install legato[disaggregated]")
        if is_local:
            # UCX listens on all of the machine's networks unless it is told so.
            os.environ["UCX_NET_DEVICES"] = "lo"
        try:
            api = import_module(f"{package}._api")
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config())
            self._region = self._agent.register_memory(
                [(memory.address, memory.num_bytes, 0, "")], "DRAM"
            )
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise ConfigError(f"NIXL does not start: {error}") from error

    def connect(self, metadata: bytes) -> str:
        with _as_transfer_error():
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def disconnect(self, peer: str) -> None:
        with contextlib.suppress(Exception):  # it was never there, or is no more
            self._agent.remove_remote_agent(peer)

    def read(self, peer: str, spans: Spans) -> "NixlRead":
        with _as_transfer_error():
            here, there = (
                self._descriptors(spans[:, 0], spans),
                self._descriptors(spans[:, 1], spans),
            )
            handle = self._agent.initialize_xfer("READ", here, there, peer)
            return NixlRead(self._agent, handle, self._agent.transfer(handle))

    def close(self) -> None:
        with contextlib.suppress(Exception):  # peers may be gone, and all of it is about to be
            self._agent.deregister_memory(self._region)

    def _descriptors(self, addresses: Spans, spans: Spans) -> Any:
        rows = np.stack([addresses, spans[:, 2], np.zeros_like(addresses)], axis=1)
        return self._agent.get_xfer_descs(rows, "DRAM")


class NixlRead:
    """A transfer that was posted; released once it is over."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = _STATES.get(state, "failed")

    def state(self) -> ReadState:
        if self._state == "running":
            try:
                told = self._agent.check_xfer_state(self._handle)
            except Exception:  # the other side was lost
                told = "ERR"
            self._state = _STATES.get(told, "failed")
        if self._state != "running":
            self.cancel()
        return self._state

    def cancel(self) -> bool:
        try:
            self._agent.release_xfer_handle(self._handle)
        except Exception:  # it cannot be stopped, and is asked again
            return False
        return True


@contextlib.contextmanager
def _as_transfer_error() -> Any:
    try:
        yield
    except Exception as error:  # NIXL has a class for each
        raise TransferError(f"NIXL: {error or type(error).__name__}") from error
