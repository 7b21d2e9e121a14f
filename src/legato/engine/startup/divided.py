"""The machinery of a model that is divided among ranks."""

from pathlib import Path
from tempfile import TemporaryDirectory

from legato.core.errors import ConfigError
from legato.engine.ranks.messages import Join, MakeCache
from legato.engine.ranks.processes import RankProcesses
from legato.engine.startup.machinery import Machinery, Wanted, make_kv, wanted_cache
from legato.engine.startup.rank_part import RankPart, make_part


def divided_machinery(wanted: Wanted) -> Machinery:
    """Have all ranks load their parts at once, this one being the first; raises as `build_engine`.

    The cache's size is that of all ranks together, so that it holds as many tokens as a whole one.
    """
    config, spec = wanted.config, wanted.checkpoint.spec
    spec.part(config.model.tensor_parallel_size)
    if wanted.device.type != "cpu":
        _check_gpus(config.model.tensor_parallel_size)
    wanted.start.end("description")
    others = RankProcesses(config)
    try:
        return _with_others(wanted, others)
    except BaseException:
        others.give_up()
        raise


def _with_others(wanted: Wanted, others: RankProcesses) -> Machinery:
    part = make_part(wanted, 0)
    others.wait()
    wanted.start.end("weights")
    if part.cannot_be_told:
        others.end_process_when_one_is_lost()
    cache = wanted_cache(wanted, wanted.checkpoint.spec.cache(wanted.dtype))
    kv = make_kv(wanted, cache, _join(part, others))
    others.tell(MakeCache(kv.num_blocks, kv.num_host_slots))
    part.make_cache(kv.num_blocks)
    others.wait()
    wanted.start.end("cache")
    return part.machinery(cache, kv, others)


def _join(part: RankPart, others: RankProcesses) -> int:
    """Returns what room there is for the cache on all ranks, in bytes."""
    # Who has joined is not known to all at once: the folder stays until it is.
    with TemporaryDirectory(prefix="legato-ranks-") as folder:
        meeting_point = Path(folder) / "store"
        others.tell(Join(str(meeting_point)))
        part.join(meeting_point)
        own = part.cache_bytes()
        return min(own, *(answer.cache_bytes for answer in others.wait()))


def _check_gpus(num_ranks: int) -> None:
    """Raises `ConfigError`: there are too few, or different ones."""
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
