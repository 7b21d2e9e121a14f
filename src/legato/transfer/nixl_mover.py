"""Copies memory between processes with NIXL, over any network that joins them."""

import contextlib
import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from legato.core.errors import ConfigError
from legato.transfer.block_memory import CacheMemory, Spans
from legato.transfer.mover import ReadState, TransferError

_PACKAGES = ("nixl_cu12", "nixl_cu13")
"""NIXL's packages on PyPI, one for each version of CUDA; both work without CUDA."""

_STATES: dict[str, ReadState] = {"DONE": "done", "PROC": "running"}


def nixl_package() -> str | None:
    """Return the name of the installed NIXL package."""
    return next((name for name in _PACKAGES if find_spec(name) is not None), None)


class NixlMover:
    """A NIXL agent with the memory of one cache.

    Args:
        name: unique among agents.
        is_local: whether only this machine may reach it.

    Raises:
        ConfigError: NIXL is missing or does not start.
    """

    def __init__(self, name: str, memory: CacheMemory, *, is_local: bool) -> None:
        package = nixl_package()
        if package is None:
            raise ConfigError("--kv-role needs NIXL: install legato-llm[disaggregated]")
        if is_local:
            # Without this, UCX listens on all networks of the machine.
            os.environ["UCX_NET_DEVICES"] = "lo"
        try:
            api = import_module(f"{package}._api")
            # NIXL's own thread would poll all the time, on a core that the model needs.
            settings = api.nixl_agent_config(enable_prog_thread=False)
            self._agent: Any = api.nixl_agent(name, settings)
            self._gpu = memory.gpu
            self._regions = self._agent.register_memory(
                [(r.address, r.num_bytes, memory.gpu or 0, "") for r in memory.regions],
                _kind(memory.gpu),
            )
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise ConfigError(f"NIXL does not start: {error}") from error

    def connect(self, metadata: bytes) -> str:
        with _as_transfer_error():
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def disconnect(self, peer: str) -> None:
        with contextlib.suppress(Exception):  # the agent may never have known the peer
            self._agent.remove_remote_agent(peer)

    def read(self, peer: str, spans: Spans, gpu: int | None) -> "NixlRead":
        with _as_transfer_error():
            here = self._descriptors(spans[:, 0], spans[:, 2], self._gpu)
            there = self._descriptors(spans[:, 1], spans[:, 2], gpu)
            handle = self._agent.initialize_xfer("READ", here, there, peer)
            return NixlRead(self._agent, handle, self._agent.transfer(handle))

    def progress(self) -> None:
        with contextlib.suppress(Exception):  # a lost peer; its reader reports it
            self._agent.get_new_notifs()

    def close(self) -> None:
        with contextlib.suppress(Exception):  # peers may be gone, and the agent ends anyway
            self._agent.deregister_memory(self._regions)

    def _descriptors(self, addresses: Spans, num_bytes: Spans, gpu: int | None) -> Any:
        devices = np.full_like(addresses, gpu or 0)
        rows = np.stack([addresses, num_bytes, devices], axis=1)
        return self._agent.get_xfer_descs(rows, _kind(gpu))


def _kind(gpu: int | None) -> str:
    """Return NIXL's name for memory of the host, or of a GPU."""
    return "DRAM" if gpu is None else "VRAM"


class NixlRead:
    """A posted transfer; released once it has ended."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = _STATES.get(state, "failed")

    def state(self) -> ReadState:
        if self._state == "running":
            try:
                told = self._agent.check_xfer_state(self._handle)
            except Exception:  # the peer was lost
                told = "ERR"
            self._state = _STATES.get(told, "failed")
        if self._state != "running":
            self.cancel()
        return self._state

    def cancel(self) -> bool:
        try:
            self._agent.release_xfer_handle(self._handle)
        except Exception:  # it cannot be stopped yet; the caller tries again
            return False
        return True


@contextlib.contextmanager
def _as_transfer_error() -> Any:
    try:
        yield
    except Exception as error:  # NIXL raises many classes
        raise TransferError(f"NIXL: {error or type(error).__name__}") from error
