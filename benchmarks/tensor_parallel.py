"""What does dividing a model among processes take, and what does it leave in each?

    python -m benchmarks tensor_parallel [--ranks 1,2,4] [--kernels auto,torch] [--rounds 15]
    python -m benchmarks tensor_parallel --model MODEL --ranks 1,3

The same steps run on each number of ranks in turn, round after round. Prints the median of each
kind of step, its ratio to the first number of ranks, how much of it rank 0 spent on exchanges with
the others, waiting for them included, and the memory of each rank's process that is its own.
On a CPU, ranks share the cores, so that this shows what is paid for the memory. Without a model,
weights are random ones of a shape that four ranks can divide.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import psutil
import torch
from matplotlib.figure import Figure

from benchmarks.runner.flags import add_rounds
from benchmarks.runner.main import main
from benchmarks.runner.rounds import turns
from benchmarks.runner.run import Run
from legato.cli.table import Table
from legato.cli.values import counts
from legato.core.cache_config import CacheConfig
from legato.core.config import EngineConfig, Kernels, ModelConfig
from legato.engine.build.builder import load_runtime
from legato.model.process_group import ProcessGroup
from legato_lab.made_up_steps import MadeUpSteps

MINUTES = 4

_PROMPT = 512
_CONTEXT = 128
_NUM_DECODES = (1, 8, 32)
_CACHE_BYTES = 2**29
_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


class Way(NamedTuple):
    """Attributes: kernels: as of `--kernels`."""

    kernels: Kernels
    num_ranks: int


class Took(NamedTuple):
    """A step. Attributes: exchange_s: of `seconds`, on rank 0."""

    seconds: float
    exchange_s: float


class Steps:
    """Of a few kinds, on one engine.

    Attributes:
        took: each step so far; key its kind.
        memory_mib: of each rank's process, without pages of files; first what rank 0's, which has
            other engines too, grew by.
        kernels: that the engine found.
    """

    def __init__(self, settings: dict[str, Any], way: Way) -> None:
        before, known = _own_mib(psutil.Process()), _rank_processes()
        runtime = load_runtime(
            EngineConfig(
                model=ModelConfig(
                    **settings,
                    kernels=way.kernels,
                    tensor_parallel_size=way.num_ranks,
                    max_model_len=_PROMPT,
                ),
                cache=CacheConfig(kv_cache_memory_bytes=_CACHE_BYTES),
            )
        )
        self.kernels = runtime.kernels
        others = [process for process in _rank_processes() if process not in known]
        self.memory_mib = [_own_mib(psutil.Process()) - before, *map(_own_mib, others)]
        self._steps = MadeUpSteps(runtime)
        self._steps.fill(max(_NUM_DECODES) * _CONTEXT, prompt=_PROMPT, chunk=_PROMPT)
        kinds: dict[str, Callable[[], float]] = {f"prefill of {_PROMPT}": self._prefill}
        for count in _NUM_DECODES:
            name = "1 decode" if count == 1 else f"{count} decodes"
            kinds[name] = partial(self._decode, count)
        self._kinds = kinds
        self.took: dict[str, list[Took]] = {kind: [] for kind in kinds}

    def run(self) -> None:
        """One of each kind."""
        for kind, step in self._kinds.items():
            with _exchanges() as exchanges:
                seconds = step()
            self.took[kind].append(Took(seconds, sum(exchanges)))
            self._steps.end()

    def median(self, kind: str) -> Took:
        """Of each of its two numbers."""
        return Took(*map(statistics.median, zip(*self.took[kind], strict=True)))

    def _prefill(self) -> float:
        self._steps.add("prompt", num_prompt_tokens=_PROMPT, first_slot=0, num_tokens=_PROMPT)
        return self._steps.run([self._steps.chunk("prompt", 0, _PROMPT)]).seconds

    def _decode(self, count: int) -> float:
        names = [f"decode {i}" for i in range(count)]
        for i, name in enumerate(names):
            self._steps.add(
                name, num_prompt_tokens=_CONTEXT, first_slot=i * _CONTEXT, num_tokens=_CONTEXT
            )
        return self._steps.run([self._steps.chunk(name, _CONTEXT - 1, 1) for name in names]).seconds


class Found(msgspec.Struct, frozen=True):
    """What is written of a way. Attributes: steps: medians; key their kind."""

    kernels: str
    num_ranks: int
    memory_mib: list[int]
    steps: dict[str, Took]

    @classmethod
    def of(cls, way: Way, steps: Steps) -> "Found":
        medians = {kind: steps.median(kind) for kind in steps.took}
        return cls(steps.kernels, way.num_ranks, steps.memory_mib, medians)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="default: random weights of a small shape")
    parser.add_argument("--ranks", type=counts, default="1,2,4", help="numbers of them")
    parser.add_argument("--kernels", default="auto,torch", help="as of `legato serve`, several")
    parser.add_argument("--dtype", default="bfloat16")
    add_rounds(parser, 15)


def measure(run: Run) -> None:
    flags = run.flags
    ways = [Way(kernels, count) for kernels in flags.kernels.split(",") for count in flags.ranks]
    with TemporaryDirectory(prefix="legato-shape-") as folder:
        settings = {
            "model": flags.model,
            "dtype": flags.dtype,
            "device": "cpu",  # a GPU's exchanges are none of the host's time
        }
        if flags.model is None:
            (Path(folder) / "config.json").write_text(json.dumps(_SHAPE))
            settings |= {"model": folder, "load_format": "dummy"}
        steps = {way: Steps(settings, way) for way in ways}
    for _, way in turns(ways, flags.rounds):
        steps[way].run()
    run.show(_table(steps))
    for way, each in steps.items():
        memory = ", ".join(map(str, each.memory_mib))
        told = f"{each.kernels}, {way.num_ranks} ranks: {memory} MiB, the cache among it"
        run.console.print(told)
    run.console.print(f"{torch.get_num_threads()} threads in all")
    run.picture(_plot(steps))
    run.write([Found.of(way, each) for way, each in steps.items()])


@contextmanager
def _exchanges() -> Iterator[list[float]]:
    """How long each of rank 0's exchanges took, within."""
    seconds: list[float] = []
    originals = {name: getattr(ProcessGroup, name) for name in ("sum", "gather")}

    def timed(exchange: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(group: ProcessGroup, values: torch.Tensor) -> torch.Tensor:
            begun_s = time.perf_counter()
            try:
                return exchange(group, values)
            finally:
                seconds.append(time.perf_counter() - begun_s)

        return run

    for name, original in originals.items():
        setattr(ProcessGroup, name, timed(original))
    try:
        yield seconds
    finally:
        for name, original in originals.items():
            setattr(ProcessGroup, name, original)


def _rank_processes() -> list[psutil.Process]:
    processes: list[psutil.Process] = psutil.Process().children(recursive=True)
    return processes


def _own_mib(process: psutil.Process) -> int:
    """Without pages of files."""
    memory = process.memory_info()
    own_bytes: int = memory.rss - memory.shared
    return own_bytes >> 20


def _table(steps: dict[Way, Steps]) -> Table:
    header = ["kernels", "ranks", "step", "ms", "to the first", "ms of exchange"]
    return Table("Steps on several ranks", header, list(_rows(steps)))


def _rows(steps: dict[Way, Steps]) -> Iterator[list[str]]:
    for way, each in steps.items():
        first = next(other for known, other in steps.items() if known.kernels == way.kernels)
        for kind in each.took:
            took = each.median(kind)
            yield [
                each.kernels,
                str(way.num_ranks),
                kind,
                f"{1000 * took.seconds:.1f}",
                f"{took.seconds / first.median(kind).seconds:.2f}",
                f"{1000 * took.exchange_s:.1f}" if way.num_ranks > 1 else "",
            ]


def _plot(steps: dict[Way, Steps]) -> Figure:
    kinds = [*next(iter(steps.values())).took]
    figure = Figure(figsize=(3 * len(kinds), 3.4), layout="constrained")
    axes = figure.subplots(1, len(kinds))
    names = [f"{each.kernels}, {way.num_ranks}" for way, each in steps.items()]
    for plot, kind in zip(axes, kinds, strict=True):
        medians = [each.median(kind) for each in steps.values()]
        exchanges = [1000 * took.exchange_s for took in medians]
        rest = [1000 * (took.seconds - took.exchange_s) for took in medians]
        plot.bar(names, rest, label="computing", color="#4477aa")
        plot.bar(names, exchanges, bottom=rest, label="exchange", color="#ee8866")
        plot.set(title=kind, ylabel="ms a step")
        plot.tick_params(axis="x", rotation=60)
    axes[-1].legend()
    figure.suptitle("Steps on several ranks, which share the cores")
    return figure


if __name__ == "__main__":
    main("tensor_parallel")
