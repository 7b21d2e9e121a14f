"""Prefill and decode apart with a model that is computed: NIXL joins its engine processes."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from legato.core.config import EngineConfig
from legato.core.sampling_params import SamplingParams
from legato.transfer.nixl_mover import nixl_package
from legato_fleet.engine import FleetEngine
from legato_fleet.routing.request import Role
from tests.checkpoint.test_dummy import described
from tests.fleet.in_process import InProcessReplicas, complete, joined, no_text
from tests.model.conftest import TINY

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(nixl_package() is None, reason="needs NIXL: legato-llm[disaggregated]"),
]

PROMPT = [7 * i % 61 for i in range(300)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


async def test_two_pools_give_the_tokens_of_one(tmp_path: Path) -> None:
    model = LlamaConfig(**TINY | {"max_position_embeddings": 512})
    config = EngineConfig.of(
        model=str(described(tmp_path / "model", model, dtype="float32")),
        load_format="dummy",
        dtype="float32",
        kernels="torch",
        block_size=16,
        kv_cache_memory_bytes=2**22,
        max_num_batched_tokens=32,
    )
    told: dict[str, list[int]] = {}
    splits: list[list[Role]] = [["both"], ["prefill", "decode"]]
    for roles in splits:
        replicas = InProcessReplicas(config, None)
        for role in roles:
            await replicas.add(role, role)
        engine = await FleetEngine.start(
            config, [replicas], no_text(), routing="kept-promise", is_only_door=True
        )
        try:
            await joined(engine, len(roles))
            done = await complete(engine, PROMPT, GREEDY)
        finally:
            await engine.close()
        told[roles[-1]] = [*done.token_ids]
        assert done.num_cached_tokens == (288 if "prefill" in roles else 0)
    assert told["decode"] == told["both"]
