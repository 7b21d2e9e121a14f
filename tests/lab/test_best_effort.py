"""A best-effort prompt that does not fit holds up no others, on the simulated CPU."""

import random

import msgspec

from legato.core.config import SchedulerConfig
from legato_lab.simulation.profiled_server import SimulatedServer
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.simulated_run import simulate
from legato_lab.simulation.workload import Workload, WorkloadRequest
from tests.lab.simulated import CPU

TTFT_S = 2.0
CACHE_TOKENS = 12_000


def chats() -> Workload:
    """Some twelve run at a time, and take up to half of the cache."""
    rng = random.Random(1)
    at_s, workload = 0.0, []
    for _ in range(189):
        at_s += rng.expovariate(1.0)
        num_output_tokens = max(2, int(rng.expovariate(1 / 300)))
        workload.append(WorkloadRequest(at_s, 100, num_output_tokens))
    return workload


def served(workload: Workload) -> list[RequestRecord]:
    profile = msgspec.structs.replace(CPU, kv_cache_tokens=CACHE_TOKENS, max_model_len=CACHE_TOKENS)
    config = SchedulerConfig(ttft_slo_s=TTFT_S, itl_slo_s=0.15, max_num_seqs=64)
    return simulate(SimulatedServer(profile=profile, scheduler=config, seed=1), workload).records


def late(records: list[RequestRecord]) -> list[float]:
    """TTFTs of chats beyond the promise."""
    chats = [record for record in records if record.request.slo_class is None]
    assert len(chats) == 189
    ttfts_s = [record.ttft_s for record in chats]
    assert None not in ttfts_s
    return [ttft_s for ttft_s in ttfts_s if ttft_s is not None and ttft_s > TTFT_S]


def test_one_large_best_effort_prompt_makes_no_chat_late() -> None:
    """While it waited for two thirds of the cache, chats waited for up to 57 s: 96 were late."""
    assert late(served(chats())) == []
    batch = WorkloadRequest(20.0, 8000, 100, slo_class="batch")
    workload = sorted([*chats(), batch], key=lambda request: request.arrival_s)
    records = served(workload)
    assert late(records) == []
    [whole] = [record for record in records if record.request.slo_class == "batch"]
    assert whole.num_tokens == 100, "served all the same"
