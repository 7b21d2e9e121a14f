"""What do quantized weights cost in perplexity, and bring in speed?

    python -m benchmarks quantization [--model MODEL] [--device cuda] [--windows 16] [--rounds 5]
                                      [--llama-cpp PATH.gguf] [--formats NAME,NAME]

For each quantization that the model and the device can have: perplexity over Python's own
documentation, 1,024 tokens at a time, and the time a token takes with 1, 8 and 32 streams. With
`--llama-cpp`, llama.cpp decodes the same file with as many in the same run; its Python package has
to be installed.

With `--formats`, the default model is written in formats in which models are published ("all", or
some of them by name), and each is measured: bits that a step reads a weight, time to load,
perplexity of the codes and of the bfloat16 weights that they stand for, prompt tokens a second, and
time a token.
"""

import argparse
import itertools
import math
import os
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import msgspec

from benchmarks.runner.flags import add_rounds
from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from legato import LLM, SamplingParams
from legato.checkpoint.source import resolve_source
from legato.cli.table import Table
from legato.core.config import DEFAULT_MODEL, Quantization
from legato.language.tokenizer.tokenizer import load_tokenizer

MINUTES = 10

STREAMS = (1, 8, 32)
_WINDOW = 1024
_PROMPT, _DECODED = "Once upon a time", 96


class Outcome(msgspec.Struct, frozen=True):
    """Attributes: token_s: key number of streams, value median seconds a step."""

    name: str
    perplexity: float | None
    token_s: dict[int, float]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--llama-cpp", type=Path, help="GGUF file for llama.cpp to decode with")
    parser.add_argument("--formats", help="published formats to measure instead, or 'all'")
    add_rounds(parser, 5, help="of which times are medians")


def measure(run: Run) -> None:
    flags = run.flags
    if flags.formats is not None:
        measure_formats(run)
        return
    outcomes = []
    for quantization in quantizations(flags.model, flags.device):
        name = "bfloat16" if quantization == "none" else quantization
        with run.status(f"{name}: loading") as status:
            llm = LLM(
                flags.model,
                device=flags.device,
                dtype="bfloat16",
                quantization=quantization,
                speculative="off",
                kv_cache_memory_bytes=2**31,
            )
            status.update(f"{name}: perplexity")
            perplexity = measure_perplexity(llm, flags.windows, flags.model)
            status.update(f"{name}: speed")
            token_s = {count: _token_s(llm, count, flags.rounds) for count in STREAMS}
        outcomes.append(Outcome(name, perplexity, token_s))
        run.tell(outcomes[-1])
    if flags.llama_cpp is not None:
        outcomes.append(_llama_cpp(flags.llama_cpp, flags.rounds))
    run.show(_table(outcomes))
    run.write(outcomes)


class FormatOutcome(msgspec.Struct, frozen=True):
    """Attributes: bits: that a step reads a weight; token_s: key number of streams."""

    name: str
    bits: float
    load_s: float
    perplexity: float
    reference_perplexity: float
    prompt_tokens_a_s: float
    token_s: dict[int, float]


def measure_formats(run: Run) -> None:
    """Measure the default model in each published format."""
    from benchmarks.formats.published import NAMES, loading, published

    flags = run.flags
    names = list(NAMES) if flags.formats == "all" else flags.formats.split(",")
    outcomes = []
    for one in published(names):
        with run.status(one.name):
            bits, load_s = loading(one)
            reference = measure_perplexity(_llm(one.reference, "none"), flags.windows)
            llm = _llm(one.path, one.quantization)
            perplexity = measure_perplexity(llm, flags.windows)
            speed = _prompt_tokens_a_s(llm, flags.rounds)
            token_s = {count: _token_s(llm, count, flags.rounds) for count in STREAMS[:2]}
        outcomes.append(
            FormatOutcome(one.name, bits, load_s, perplexity, reference, speed, token_s)
        )
        run.tell(outcomes[-1])
    header = ["format", "bits", "load", "perplexity", "of its weights", "prompt", "1 stream", "8"]
    run.show(Table("The default model as published", header, [_format_row(o) for o in outcomes]))
    run.write(outcomes)


def _llm(path: str, quantization: Quantization | None) -> LLM:
    return LLM(
        path,
        tokenizer=DEFAULT_MODEL,
        device="cpu",
        dtype="bfloat16",
        max_model_len=2 * _WINDOW,
        quantization=quantization,
        speculative="off",
        kv_cache_memory_bytes=2**29,
    )


def _prompt_tokens_a_s(llm: LLM, num_rounds: int) -> float:
    times_s = []
    params = SamplingParams(max_tokens=1)
    for window in windows_of_text(num_rounds + 1)[1:]:
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": window[::-1]}], params, use_tqdm=False)
        times_s.append(time.perf_counter() - begin)
    return _WINDOW / statistics.median(times_s)


def _format_row(outcome: FormatOutcome) -> list[str]:
    return [
        outcome.name,
        f"{outcome.bits:.2f}",
        f"{outcome.load_s:.2f} s",
        f"{outcome.perplexity:.3f}",
        f"{outcome.reference_perplexity:.3f}",
        f"{outcome.prompt_tokens_a_s:,.0f}/s",
        *(f"{1e3 * seconds:.1f} ms" for seconds in outcome.token_s.values()),
    ]


def quantizations(model: str, device: str) -> list[Quantization]:
    """Return the quantizations that a model can have on a device; "none" first."""
    able: list[Quantization] = ["none", "int8", "int4"]
    if resolve_source(model).is_gguf:
        able.append("gguf")
    return [*able, *(("w8a8", "w4a8") if device == "cpu" else ("fp8",))]


def windows_of_text(
    num_windows: int, length: int = _WINDOW, model: str = DEFAULT_MODEL
) -> list[list[int]]:
    """So many pieces of Python's own documentation, one behind the other, in a model's tokens."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = load_tokenizer(resolve_source(model)).encode(text)
    return [tokens[i * length : (i + 1) * length] for i in range(num_windows)]


def measure_perplexity(llm: LLM, num_windows: int, model: str = DEFAULT_MODEL) -> float:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    windows = windows_of_text(num_windows, model=model)
    answers = llm.generate(
        [{"prompt_token_ids": window} for window in windows],
        params,
        use_tqdm=False,
    )
    entries = itertools.chain(*(answer.outputs[0].prompt_logprobs or [] for answer in answers))
    return math.exp(-statistics.fmean(entry.logprob for entry in entries))


def _token_s(llm: LLM, num_streams: int, num_rounds: int) -> float:
    """What `_DECODED` tokens take beyond the first, of each stream."""
    times_s = []
    for _ in range(num_rounds):
        lengths_s = []
        for num_tokens in (1, 1 + _DECODED):
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
            begin = time.perf_counter()
            llm.generate([_PROMPT] * num_streams, params, use_tqdm=False)
            lengths_s.append(time.perf_counter() - begin)
        times_s.append((lengths_s[1] - lengths_s[0]) / _DECODED)
    return statistics.median(times_s)


def _llama_cpp(path: Path, num_rounds: int) -> Outcome:
    """Steps of one token for each of several sequences, as its server's slots share them.

    Sampling is left out.
    """
    import llama_cpp

    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    rounds = [
        {count: _llama_cpp_step_s(model, count) for count in STREAMS} for _ in range(num_rounds)
    ]
    return Outcome(
        "llama.cpp",
        None,
        {count: statistics.median(times_s[count] for times_s in rounds) for count in STREAMS},
    )


def _llama_cpp_step_s(model: Any, num_streams: int) -> float:
    """Median over as many steps as Legato's streams have tokens."""
    import llama_cpp

    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = 256 * num_streams, num_streams
    settings.n_threads = settings.n_threads_batch = len(os.sched_getaffinity(0))
    context = llama_cpp.llama_init_from_model(model, settings)
    batch = llama_cpp.llama_batch_init(num_streams, 0, 1)
    batch.n_tokens = num_streams
    times_s = []
    for step in range(_DECODED):
        for stream in range(num_streams):
            batch.token[stream], batch.pos[stream] = 100 + step, step
            batch.n_seq_id[stream], batch.seq_id[stream][0] = 1, stream
            batch.logits[stream] = True
        begin = time.perf_counter()
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama.cpp computed no step")
        llama_cpp.llama_get_logits_ith(context, num_streams - 1)  # waits for it
        times_s.append(time.perf_counter() - begin)
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return statistics.median(times_s)


def _table(outcomes: list[Outcome]) -> Table:
    header = ["weights", "perplexity", *(f"{count} stream{'s' * (count > 1)}" for count in STREAMS)]
    return Table("A token, by the weights", header, [_row(outcome) for outcome in outcomes])


def _row(outcome: Outcome) -> list[str]:
    perplexity = "" if outcome.perplexity is None else f"{outcome.perplexity:.3f}"
    times_s = (outcome.token_s.get(count) for count in STREAMS)
    told = ("" if seconds is None else f"{1e3 * seconds:.1f} ms" for seconds in times_s)
    return [outcome.name, perplexity, *told]


if __name__ == "__main__":
    main("quantization")
