"""A prompt that one GPU's engine computes, and another's continues."""

import sys
from contextlib import closing
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from legato.engine.build.transfers import cache_memory
from legato.transfer import nixl_mover
from legato.transfer.block_memory import CacheMemory, Region
from legato.transfer.nixl_mover import NixlMover
from tests.engine.peers import Engine, fetched, run, sent, transferred
from tests.gpu.host_twin import on_the_twin
from tests.gpu.test_end_to_end import CONFIGS
from tests.gpu.test_startup import MAX_LEN, put_on_a_gpu
from tests.model.conftest import SaveTiny, save_tiny

__all__ = ["save_tiny"]

PROMPT = [5, 20, 45, 80, 1, 2, 3, 4, 6]
SETTINGS: dict[str, Any] = {
    "kernels": "auto",
    "max_model_len": MAX_LEN,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 6,
    "block_size": 4,
}


@on_the_twin
def test_an_engine_on_a_gpu_goes_on_from_anothers_blocks(
    save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = save_tiny(CONFIGS["qwen3"])
    put_on_a_gpu(monkeypatch)
    with (
        closing(Engine(folder, **SETTINGS)) as prefill,
        closing(Engine(folder, **SETTINGS)) as decode,
    ):
        assert prefill.layout["--kernels"] == "triton"
        prefill.go(sent("a", PROMPT))
        run(prefill, until=lambda: prefill.end("a") is not None)
        decode.go(fetched("a", prefill, PROMPT))
        run(prefill, decode, until=lambda: decode.end("a") is not None)
        last = decode.end("a")
        assert last is not None
        assert last.num_cached_tokens == 8
        assert transferred(decode).num_bytes == 8 * decode.token_bytes
        assert decode.tokens("a")[0] == prefill.tokens("a")[0], "sampled by either"
        run(prefill, decode, until=lambda: prefill.is_clean and decode.is_clean)


class Agent:
    """What NIXL's agent is asked for."""

    def __init__(self, name: str, _config: object) -> None:
        self.name = name
        self.asked: list[tuple[Any, ...]] = []

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> object:
        self.asked.append((kind, regions))
        return object()

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def get_xfer_descs(self, rows: "np.ndarray[Any, Any]", kind: str) -> object:
        self.asked.append((kind, rows.tolist()))
        return rows

    def initialize_xfer(self, *_: object) -> object:
        return object()

    def transfer(self, _: object) -> str:
        return "DONE"


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ModuleType("made_up_nixl._api")
    api.nixl_agent, api.nixl_agent_config = Agent, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_nixl", ModuleType("made_up_nixl"))
    monkeypatch.setitem(sys.modules, "made_up_nixl._api", api)
    monkeypatch.setattr(nixl_mover, "nixl_package", lambda: "made_up_nixl")


@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize(
    ("here", "there", "kinds"),
    [(None, None, ("DRAM", "DRAM")), (1, 3, ("VRAM", "VRAM")), (0, 0, ("VRAM", "VRAM"))],
)
def test_nixl_is_told_on_which_gpu_memory_lies(
    here: int | None, there: int | None, kinds: tuple[str, str]
) -> None:
    region = Region(address=4096, num_planes=2, num_blocks=8, block_bytes=64)
    memory = CacheMemory(groups=((region,),), gpu=here)
    mover = NixlMover("a", memory, is_local=False)
    mover.read("b", memory.spans([1, 2], memory, [5, 6]), there)
    registered, ours, theirs = mover._agent.asked
    assert registered == (kinds[0], [(4096, region.num_bytes, here or 0, "")])
    first = [4096 + 64, 128, here or 0]
    assert (ours[0], ours[1][0]) == (kinds[0], first)
    assert (theirs[0], theirs[1][0]) == (kinds[1], [4096 + 5 * 64, 128, there or 0])


def test_a_cache_says_where_it_lies(device: torch.device) -> None:
    memory = cache_memory([torch.empty(2, 2, 8, 16, device=device)])
    [region] = memory.regions
    assert (region.num_planes, region.num_blocks, region.block_bytes) == (4, 8, 64)
    assert memory.gpu == (0 if device.type == "cuda" else None)
