"""vLLM beside Legato, over HTTP: the same shape, the same client, the same prompts.

vLLM is carried to a machine without a network as wheels, in slices of at most 64 MiB:

    split -b 60M vllm-0.22.0-*.whl slices/vllm.     # here
    cat slices/vllm.* > vllm-0.22.0-*.whl           # there, after the last slice has come
    pip install --no-index --no-deps --target out/vllm vllm-0.22.0-*.whl
"""

import asyncio
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.gpu.figures import PartFailedError, Report, Row
from benchmarks.gpu.settings import Settings
from benchmarks.runner.servers import running_server
from legato_lab.load.client import Address, connect
from legato_lab.probe import Probe, ProbeResult
from legato_lab.simulation.record import RequestError

TITLE = "Servers: Legato with a promise, vLLM with chunks of a fixed size"

_MODEL = "model"


def run(settings: Settings, report: Report) -> None:
    report.note(
        "Streams decode while long prompts come, then a batch comes at once, all over HTTP. "
        "vLLM has a chunk size for all steps; Legato fits each step into the promise."
    )
    _write_tokenizer(Path(settings.model), settings.vocab_size)
    failures: list[str] = []
    for name, command in _commands(settings):
        try:
            _measure(settings, report, name, shlex.join(command))
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    if failures:
        raise PartFailedError("; ".join(failures))


def _commands(settings: Settings) -> Iterator[tuple[str, list[str]]]:
    """Yield servers' names and commands, the ones of most worth first."""
    sizes = settings.sizes
    common = [settings.model, "--load-format", "dummy", "--served-model-name", _MODEL]
    common += ["--max-model-len", str(sizes.max_model_len), "--host", "127.0.0.1"]
    common += ["--port", "{port}", "--max-num-seqs", str(max(sizes.streams))]
    legato = [sys.executable, "-m", "legato", "serve", *common]
    legato += ["--device", settings.device, "--max-num-batched-tokens", str(max(sizes.chunks))]
    if settings.itl_slo_s is not None:
        promise = f"{1e3 * settings.itl_slo_s:g}ms"
        yield f"Legato, {promise} promised", [*legato, "--itl-slo", promise]
    if shutil.which(settings.vllm[0]) is None:
        raise PartFailedError(f"there is no {settings.vllm[0]} here")
    for chunk in sizes.vllm_chunks:
        own = ["--max-num-batched-tokens", str(chunk), *_VLLM]
        yield f"vLLM, chunks of {chunk:,}", [*settings.vllm, "serve", *common, *own]
    yield "Legato, no promise", legato


_VLLM = ("--no-enable-prefix-caching",)
"""As prompts differ, its cache of prefixes would find nothing."""


def _measure(settings: Settings, report: Report, name: str, command: str) -> None:
    sizes, limit = settings.sizes, settings.itl_slo_s
    begun_s = time.perf_counter()
    with running_server(command) as url:
        report.add(Row(name=f"{name}: start", value=time.perf_counter() - begun_s, unit="s"))
        probe = Probe(
            url,
            _MODEL,
            num_streams=sizes.probe_streams,
            long_prompt=sizes.prompt,
            num_longs=sizes.probe_longs,
            steady_s=sizes.probe_s / 4,
            vocab_size=settings.vocab_size,
        )
        report.add(*_rows(name, asyncio.run(probe.run()), limit))
        report.add(asyncio.run(_batch(settings, name, url)))


def _rows(name: str, result: ProbeResult, limit_s: float | None) -> list[Row]:
    calm, loaded = (1e3 * result.itl_s(during=during) for during in (False, True))
    if not len(calm) or not len(loaded):
        raise RequestError("no stream had two deliveries while it was watched")
    limit = None if limit_s is None else 1e3 * limit_s
    return [
        Row(name=f"{name}: median gap", value=float(np.median(calm)), unit="ms"),
        Row(name=f"{name}: median beside long prompts", value=float(np.median(loaded)), unit="ms"),
        Row(
            name=f"{name}: P99 beside them",
            value=float(np.quantile(loaded, 0.99)),
            unit="ms",
            limit=limit,
        ),
        Row(name=f"{name}: long prompts' TTFT", value=1e3 * result.ttft_s, unit="ms"),
        Row(
            name=f"{name}: streams' output beside them",
            value=result.tokens_per_s(during=True),
            unit="tokens/s",
        ),
    ]


async def _batch(settings: Settings, name: str, url: str) -> Row:
    count, length, num_tokens = settings.sizes.batch
    prompts = settings.prompts
    async with connect(Address(base_url=url, model=_MODEL)) as client:
        begun_s = time.perf_counter()
        await asyncio.gather(
            *(client.complete(prompts.draw(length), num_tokens, []) for _ in range(count))
        )
        taken_s = time.perf_counter() - begun_s
    return Row(
        name=f"{name}: output of {count} x {length:,} in, {num_tokens} out",
        value=count * num_tokens / taken_s,
        unit="tokens/s",
    )


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with a string for each token, since servers do not start without one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(f"x{i:x}" for i in range(vocab_size - len(letters)))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
