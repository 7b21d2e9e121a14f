"""What does dividing a model among processes take, and what does it leave in each?

    python -m benchmarks.tensor_parallel [--model MODEL] [--ranks 1,3] [--dtype float32]

The same steps run on each number of ranks in turn, round after round. Prints the median of each
kind of step, its ratio to the first number of ranks, and the memory of each rank's process that is
its own. Ranks share the cores, so that on one machine this shows what the exchange costs.
"""

import argparse
import statistics
from collections.abc import Callable

import psutil
from rich.console import Console
from rich.table import Table

from legato.bench.made_up_steps import MadeUpSteps
from legato.core.config import CacheConfig, EngineConfig, ModelConfig
from legato.engine.startup.build import EngineParts, load_parts

_ROUNDS = 15
_PROMPT = 512
_CONTEXT = 256
_SLOT = 512
_NUM_DECODES = (1, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument("--ranks", default="1,3", help="numbers of ranks, with commas between them")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--load-format", default="auto")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.ranks.split(",")]
    console = Console(highlight=False)
    memory: dict[int, list[int]] = {}  # key number of ranks, value MiB a process
    steps: dict[int, Steps] = {}
    for count in counts:
        before = _own_mib(psutil.Process())
        known = _rank_processes()
        parts = load_parts(
            EngineConfig(
                model=ModelConfig(
                    model=arguments.model,
                    dtype=arguments.dtype,
                    load_format=arguments.load_format,
                    kernels="torch",
                    tensor_parallel_size=count,
                    max_model_len=_SLOT,
                ),
                cache=CacheConfig(kv_cache_memory_bytes=2**30),
            )
        )
        others = [process for process in _rank_processes() if process not in known]
        memory[count] = [_own_mib(psutil.Process()) - before, *map(_own_mib, others)]
        steps[count] = Steps(parts)
    for _ in range(_ROUNDS):
        for each in steps.values():
            each.run()
    console.print(_table(steps))
    for count, mib in memory.items():
        console.print(f"{count} ranks: {', '.join(map(str, mib))} MiB, the cache among it")


class Steps:
    """Of a few kinds, on one engine.

    Attributes:
        seconds: of each step so far; key its kind.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._steps = MadeUpSteps(parts)
        self._num_slots = min(max(_NUM_DECODES), self._steps.num_cache_tokens // _SLOT)
        self._steps.fill(self._num_slots * _SLOT, prompt=_SLOT, chunk=_PROMPT)
        kinds: dict[str, Callable[[], float]] = {f"prefill of {_PROMPT}": self._prefill}
        for count in _NUM_DECODES:
            if count <= self._num_slots:
                kinds[f"{count} decodes"] = lambda count=count: self._decode(count)
        self._kinds = kinds
        self.seconds: dict[str, list[float]] = {kind: [] for kind in kinds}

    def run(self) -> None:
        """One of each kind."""
        for kind, step in self._kinds.items():
            self.seconds[kind].append(step())
            self._steps.end()

    def _prefill(self) -> float:
        self._steps.add("prompt", num_prompt_tokens=_PROMPT, first_slot=0, num_tokens=_SLOT)
        return self._steps.run([self._steps.chunk("prompt", 0, _PROMPT)]).seconds

    def _decode(self, count: int) -> float:
        names = [f"decode {i}" for i in range(count)]
        for i, name in enumerate(names):
            self._steps.add(
                name, num_prompt_tokens=_CONTEXT, first_slot=i * _SLOT, num_tokens=_SLOT
            )
        return self._steps.run([self._steps.chunk(name, _CONTEXT - 1, 1) for name in names]).seconds


def _rank_processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _own_mib(process: psutil.Process) -> int:
    """Without pages of files."""
    memory = process.memory_info()
    return (memory.rss - memory.shared) >> 20


def _table(steps: dict[int, Steps]) -> Table:
    first = next(iter(steps.values()))
    table = Table("step", *(f"{count} ranks" for count in steps))
    for kind in first.seconds:
        usual = statistics.median(first.seconds[kind])
        cells = []
        for each in steps.values():
            median = statistics.median(each.seconds[kind])
            cells.append(f"{1000 * median:.1f} ms ({median / usual:.2f})")
        table.add_row(kind, *cells)
    return table


if __name__ == "__main__":
    main()
