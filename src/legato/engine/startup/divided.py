"""The machinery of a model that is divided among ranks, on a CPU."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from legato.core.config import EngineConfig
from legato.core.rows import CPU_ROWS
from legato.engine.ranks.messages import Join, MakeCache
from legato.engine.ranks.processes import RankProcesses
from legato.engine.startup.host import (
    check_steps_in_flight,
    load_host_model,
    make_attention,
    native_kernels,
    untaken_pages,
)
from legato.engine.startup.machinery import Machinery, Wanted, make_kv, wanted_cache
from legato.engine.startup.parts import StartParts
from legato.engine.startup.wanted import wanted_of
from legato.executor.attention.base import AttentionBackend
from legato.executor.first_pass import check_forward
from legato.executor.memory import host_cache_bytes
from legato.executor.ranks.agreement import Agreement
from legato.executor.ranks.divided import DividedModel
from legato.executor.ranks.follower import Follower
from legato.executor.ranks.lead import LeadAttention, LeadExecutor, LeadModel
from legato.executor.untaken_pages import UntakenPages
from legato.model.decoder import Decoder
from legato.model.process_group import ProcessGroup


class RankPart:
    """What every rank has of model and cache: it is loaded, given a cache, and joined, in turn.

    Attributes:
        attention: with this rank's heads.
        untaken: what of the cache's memory may be taken while there is nothing to do.
    """

    attention: AttentionBackend
    untaken: UntakenPages | None = None

    def __init__(self, wanted: Wanted, rank: int) -> None:
        """Load it; raises as `build_engine`."""
        self._wanted = wanted
        self._group = ProcessGroup(rank, wanted.config.model.tensor_parallel_size)
        agreement = Agreement(self._group)
        model = load_host_model(wanted, None, agreement)
        assert isinstance(model, Decoder)
        self.divided = DividedModel(model, agreement)

    def make_cache(self, num_blocks: int) -> None:
        """Raises `ConfigError`: there is no memory for it."""
        model, config = self.divided.own, self._wanted.config.cache
        cache = wanted_cache(self._wanted, model.cache)
        self.attention = make_attention(model, cache, num_blocks, config)
        self.untaken = untaken_pages(config, self.attention)

    def join(self, meeting_point: Path) -> None:
        """Raises `RankLostError`: not all ranks have come."""
        self._group.join(meeting_point)

    def follower(self, num_host_slots: int) -> Follower:
        """Once it is joined; see `Follower`."""
        return Follower(self.divided, self.attention, num_host_slots=num_host_slots)


def load_part(config: EngineConfig, rank: int) -> RankPart:
    """The part of a rank in a process of its own; raises as `build_engine`.

    Args:
        config: as rank 0 resolved it.
    """
    wanted = wanted_of(config, None, StartParts())
    if config.model.num_threads is not None:
        torch.set_num_threads(config.model.num_threads)
    torch.set_num_threads(threads_of_a_rank(wanted))
    return RankPart(wanted, rank)


def divided_machinery(wanted: Wanted) -> Machinery:
    """Have all ranks load their parts at once, this one being the first; raises as `build_engine`.

    The cache's size is that of all ranks together, so that it holds as many tokens as a whole one.
    """
    config, spec = wanted.config, wanted.checkpoint.spec
    check_steps_in_flight(config)
    spec.part(config.model.tensor_parallel_size)
    native_kernels(config, spec, wanted.dtype, wanted.device)
    wanted.start.end("description")
    others = RankProcesses(config)
    try:
        return _with_others(wanted, others)
    except BaseException:
        others.give_up()
        raise


def _with_others(wanted: Wanted, others: RankProcesses) -> Machinery:
    config, start, spec = wanted.config, wanted.start, wanted.checkpoint.spec
    part = RankPart(wanted, 0)
    others.wait()
    start.end("weights")
    cache = wanted_cache(wanted, spec.cache(wanted.dtype))
    kv = make_kv(wanted, cache, host_cache_bytes(config.cache))
    others.tell(MakeCache(kv.num_blocks, kv.num_host_slots))
    part.make_cache(kv.num_blocks)
    others.wait()
    start.end("cache")
    with TemporaryDirectory(prefix="legato-ranks-") as folder:
        meeting_point = Path(folder) / "store"
        others.tell(Join(str(meeting_point)))
        part.join(meeting_point)
        others.wait()  # who has joined is not known to all at once: the folder must stay until then
    model = LeadModel(part.divided, others, num_torch_threads=threads_of_a_rank(wanted))
    attention = LeadAttention(part.attention)
    check_forward(
        model,
        attention,
        block_size=kv.block_size,
        vocab_size=spec.vocab_size,
        max_len=wanted.max_model_len,
    )
    start.end("first pass")
    executor = LeadExecutor(
        model,
        attention,
        kv.block_size,
        num_host_slots=kv.num_host_slots,
        grammar=wanted.grammar,
        followers=others,
    )
    return Machinery(model, cache, kv, executor, CPU_ROWS, "torch", part.untaken)


def threads_of_a_rank(wanted: Wanted) -> int:
    """For PyTorch's operators: ranks share the cores."""
    return max(1, torch.get_num_threads() // wanted.config.model.tensor_parallel_size)
