"""Builds the runtime of a model that is divided among ranks."""

from pathlib import Path
from tempfile import TemporaryDirectory

from legato.core.errors import ConfigError
from legato.engine.build.blueprint import Blueprint
from legato.engine.build.kv_cache import configured_cache, make_kv_manager
from legato.engine.build.ranks.processes import RankProcesses
from legato.engine.build.ranks.rank import Rank, make_rank
from legato.engine.build.ranks.rank_start import Join, MakeCache
from legato.engine.build.runtime import ModelRuntime


def divided_runtime(blueprint: Blueprint) -> ModelRuntime:
    """Load the parts of all ranks at the same time, as rank 0; raises like `build_engine`.

    The cache's size is the sum over ranks, so that it holds as many tokens as on one rank.
    """
    config, spec = blueprint.config, blueprint.checkpoint.spec
    spec.part(config.model.tensor_parallel_size)
    if blueprint.device.type != "cpu":
        _check_gpus(config.model.tensor_parallel_size)
    blueprint.timer.end("description")
    others = RankProcesses(config)
    try:
        return _with_others(blueprint, others)
    except BaseException:
        others.give_up()
        raise


def _with_others(blueprint: Blueprint, others: RankProcesses) -> ModelRuntime:
    first = make_rank(blueprint, 0)
    others.wait()
    blueprint.timer.end("weights")
    if first.blocks_on_lost_rank:
        others.end_process_when_one_is_lost()
    cache = configured_cache(blueprint, blueprint.checkpoint.spec.cache(blueprint.dtype))
    kv = make_kv_manager(blueprint, cache.groups(blueprint.max_model_len), _join(first, others))
    others.broadcast(MakeCache(kv.group_sizes, kv.num_states, kv.host_sizes, kv.num_host_states))
    first.make_cache(kv.group_sizes, kv.num_states)
    others.wait()
    blueprint.timer.end("cache")
    return first.runtime(cache, kv, others)


def _join(first: Rank, others: RankProcesses) -> int:
    """Return the memory for the cache on all ranks, in bytes."""
    # Ranks learn at different times that all have joined: the folder stays until every rank knows.
    with TemporaryDirectory(prefix="legato-ranks-") as folder:
        meeting_point = Path(folder) / "store"
        others.broadcast(Join(str(meeting_point)))
        first.join(meeting_point)
        own = first.cache_bytes()
        return min(own, *(answer.cache_bytes for answer in others.wait()))


def _check_gpus(num_ranks: int) -> None:
    """Raises `ConfigError` if there are too few GPUs, or different ones."""
    from legato.gpu.device import gpu_names

    names = gpu_names()
    if len(names) < num_ranks:
        raise ConfigError(
            f"--tensor-parallel-size {num_ranks} needs as many GPUs, and torch sees {len(names)}"
        )
    if len(set(names[:num_ranks])) > 1:
        raise ConfigError(
            f"ranks compute in lockstep on GPUs of one kind, and torch sees {', '.join(names)}: "
            "CUDA_VISIBLE_DEVICES chooses some"
        )
