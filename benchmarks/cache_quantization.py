"""What does a KV cache of 8 bits cost in perplexity, and bring in speed?

    python -m benchmarks cache_quantization [--windows 16] [--rounds 3]

Beside the model's own dtype: perplexity over Python's own documentation, 1,024 tokens at a time;
how far greedy answers to 32 pieces of it go before they part; and the time of a decode step of a
few shapes, both caches in turn.
"""

import argparse
import statistics
import time
from itertools import takewhile

import msgspec

from benchmarks.quantization import measure_perplexity, windows_of_text
from benchmarks.runner.flags import add_rounds
from benchmarks.runner.main import main
from benchmarks.runner.rounds import turns
from benchmarks.runner.run import Run
from legato import LLM, SamplingParams
from legato.cli.table import Table
from legato.core.cache_config import KVCacheDType

MINUTES = 8

DTYPES: tuple[KVCacheDType, ...] = ("auto", "int8")
SHAPES = ((1, 512), (64, 512), (8, 4096))
_ANSWERS, _PROMPT, _ANSWER = 32, 256, 64
_DECODED = 24


class Outcome(msgspec.Struct):
    """Attributes: step_s: key streams x context, value median seconds of a decode step."""

    perplexity: float
    answers: list[list[int]]
    step_s: dict[str, float] = {}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--windows", type=int, default=16)
    add_rounds(parser, 3, "--repeats")


def measure(run: Run) -> None:
    llms = {dtype: LLM(kv_cache_dtype=dtype, kv_cache_memory_bytes=2 * 2**30) for dtype in DTYPES}
    outcomes: dict[str, Outcome] = {}
    for dtype, llm in llms.items():
        run.tell(f"{dtype}: perplexity and answers")
        outcomes[dtype] = Outcome(measure_perplexity(llm, run.flags.windows), _answers(llm))
    for num_streams, context in SHAPES:
        run.tell(f"{num_streams} streams of {context:,} tokens")
        prompts = windows_of_text(num_streams, context)
        times_s: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
        for llm in llms.values():
            _generate(llm, prompts, 1)
        for _, dtype in turns(DTYPES, run.flags.rounds):
            times_s[dtype].append(_step_s(llms[dtype], prompts))
        for dtype in DTYPES:
            shape = f"{num_streams} x {context:,}"
            outcomes[dtype].step_s[shape] = statistics.median(times_s[dtype])
    run.show(_table(outcomes))
    run.console.print(_agreement(*(outcome.answers for outcome in outcomes.values())))
    run.write(outcomes)


def _answers(llm: LLM) -> list[list[int]]:
    return _generate(llm, windows_of_text(_ANSWERS, _PROMPT), _ANSWER)


def _generate(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    return [output.outputs[0].token_ids for output in outputs]


def _step_s(llm: LLM, prompts: list[list[int]]) -> float:
    """What tokens take beyond the first; the prompts are in the prefix cache."""
    lengths_s = []
    for num_tokens in (1, 1 + _DECODED):
        begin = time.perf_counter()
        _generate(llm, prompts, num_tokens)
        lengths_s.append(time.perf_counter() - begin)
    return (lengths_s[1] - lengths_s[0]) / _DECODED


def _agreement(plain: list[list[int]], quantized: list[list[int]]) -> str:
    common = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))
        for a, b in zip(plain, quantized, strict=True)
    ]
    num_equal = sum(count == _ANSWER for count in common)
    return (
        f"{num_equal} of {len(common)} greedy answers of {_ANSWER} tokens are the same; on average "
        f"{statistics.fmean(common):.1f} tokens are before they part"
    )


def _table(outcomes: dict[str, Outcome]) -> Table:
    shapes = list(next(iter(outcomes.values())).step_s)
    rows = [
        [
            dtype,
            f"{outcome.perplexity:.4f}",
            *(f"{1e3 * outcome.step_s[shape]:.1f} ms" for shape in shapes),
        ]
        for dtype, outcome in outcomes.items()
    ]
    return Table("A step, by the cache", ["cache", "perplexity", *shapes], rows)


if __name__ == "__main__":
    main("cache_quantization")
