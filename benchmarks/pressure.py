"""What happens when the KV cache is too small for all that want it?

    python -m benchmarks.pressure [--rounds 1] [--out out]

Serves requests that are all there at once with as much cache as they can use and with a quarter of
that, by admission optimism; then conversations whose blocks are evicted before their next turn,
computed again or brought back from host memory (`--swap-space`). All ways take turns, round by
round; figures are medians. Writes pressure.json and pressure.png.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from legato import LLM, SamplingParams
from legato.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from legato.engine.prompts import TokensPrompt

_BLOCK_BYTES = 32 * 23_040
_MAX_MODEL_LEN = 4096
_NUM_REQUESTS, _PROMPT_LEN, _OUTPUT_LEN = 80, 256, 128
_PLENTY, _SCARCE = 700, 175
"""Blocks: as many as 64 such requests come to hold, and a quarter of that."""

_NUM_CONVERSATIONS, _HISTORY_LEN = 12, 1500
_HISTORY_BLOCKS = _HISTORY_LEN // 32 + 2

Measure = Callable[[LLM, int], tuple[int, float]]
"""Takes an engine and the round; returns the number of tokens generated, and the seconds."""


class Served(msgspec.Struct, frozen=True):
    """One way, in one round."""

    way: str
    tokens_per_s: float
    num_preemptions: int


def main() -> None:
    arguments = _parse()
    console = Console(highlight=False)
    with Progress(console=Console(stderr=True)) as progress:
        results = [
            _compare(ways, measure, arguments.rounds, progress)
            for ways, measure in ((_pressed_ways(), _crowd), (_swap_ways(), _next_turns))
        ]
    for title, served in zip(("all at once", "next turns"), results, strict=True):
        console.print(_table(title, served))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "pressure.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    _plot(results, arguments.out / "pressure.png")
    console.print(f"written to {path} and {arguments.out}/pressure.png")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def _pressed_ways() -> dict[str, EngineConfig]:
    scarce = {
        f"a quarter, optimism {optimism:g}": _config(_SCARCE, optimism=optimism)
        for optimism in (0.0, 0.5, 1.0)
    }
    return {"plenty": _config(_PLENTY), **scarce}


def _swap_ways() -> dict[str, EngineConfig]:
    few, all_blocks = _MAX_MODEL_LEN // 32, (_NUM_CONVERSATIONS + 2) * _HISTORY_BLOCKS
    return {
        "computed again": _config(few),
        "swap space": _config(few, num_swap_blocks=all_blocks),
        "cache for all": _config(all_blocks),
    }


def _config(num_blocks: int, *, optimism: float = 0.5, num_swap_blocks: int = 0) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(max_model_len=_MAX_MODEL_LEN),
        cache=CacheConfig(
            kv_cache_memory_bytes=num_blocks * _BLOCK_BYTES,
            swap_space_bytes=num_swap_blocks * _BLOCK_BYTES,
        ),
        scheduler=SchedulerConfig(admission_optimism=optimism),
    )


def _compare(
    ways: dict[str, EngineConfig], measure: Measure, num_rounds: int, progress: Progress
) -> list[Served]:
    llms = {way: LLM.from_config(config) for way, config in ways.items()}
    for llm in llms.values():
        measure(llm, 0)
    turns = [(number, way) for number in range(1, num_rounds + 1) for way in ways]
    served = []
    for number, way in progress.track(turns, description=measure.__name__.strip("_")):
        num_before = llms[way].stats.num_preemptions
        num_tokens, seconds = measure(llms[way], number)
        num_preemptions = llms[way].stats.num_preemptions - num_before
        served.append(Served(way, num_tokens / seconds, num_preemptions))
    return served


def _crowd(llm: LLM, number: int) -> tuple[int, float]:
    """Requests that are all there at once, with prompts that no other round has."""
    rng = random.Random(number)
    prompts = [_tokens(rng, _length(rng, _PROMPT_LEN)) for _ in range(_NUM_REQUESTS)]
    lengths = [_length(rng, _OUTPUT_LEN) for _ in prompts]
    return _generate(llm, prompts, lengths)


def _next_turns(llm: LLM, number: int) -> tuple[int, float]:
    """One turn of every conversation, one after the other; the first round has all of them new."""
    histories = [_tokens(random.Random(i), _HISTORY_LEN) for i in range(_NUM_CONVERSATIONS)]
    num_tokens, seconds = 0, 0.0
    for history in histories:
        question = [100 + number] * 8
        turn_tokens, turn_s = _generate(llm, [history + question], [16])
        num_tokens, seconds = num_tokens + turn_tokens, seconds + turn_s
    return num_tokens, seconds


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(length)]


def _length(rng: random.Random, mean: int) -> int:
    return min(1500, round(mean * rng.lognormvariate(-0.18, 0.6)) + 1)


def _generate(llm: LLM, prompts: Sequence[list[int]], lengths: Sequence[int]) -> tuple[int, float]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths
    ]
    started_s = time.perf_counter()
    llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    return sum(lengths), time.perf_counter() - started_s


def _table(title: str, served: list[Served]) -> Table:
    table = Table("", "tokens/s", "of the first", "preemptions", title=title)
    medians = _medians(served)
    for way, tokens_per_s in medians.items():
        preemptions = statistics.median(s.num_preemptions for s in served if s.way == way)
        share = tokens_per_s / next(iter(medians.values()))
        table.add_row(way, f"{tokens_per_s:.1f}", f"{share:.2f}x", f"{preemptions:g}")
    return table


def _medians(served: list[Served]) -> dict[str, float]:
    """Tokens a second; key the way."""
    ways = dict.fromkeys(s.way for s in served)
    return {way: statistics.median(s.tokens_per_s for s in served if s.way == way) for way in ways}


def _plot(results: list[list[Served]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
    for plot, title, served in zip(axes, ("all at once", "next turns"), results, strict=True):
        medians = _medians(served)
        plot.barh([*medians], [*medians.values()])
        plot.invert_yaxis()
        plot.set(title=title, xlabel="tokens a second")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
