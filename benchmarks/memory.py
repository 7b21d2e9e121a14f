"""How much memory does a prompt take while it is computed, in chunks and in one piece?

    python -m benchmarks.memory [--kernels auto] [--out out]

For each length, one process loads a model, computes a short prompt and then one of that length, and
tells by how much the latter raised the most memory that was ever resident (Linux), beyond the keys
and values that any way of computing it has to keep. Prompts of up to 8k tokens go to the default
model, longer ones to a small one of random weights. Writes memory.json and memory.png.
"""

import argparse
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import get_args

import matplotlib.pyplot as plt
import msgspec
from rich.console import Console
from rich.table import Table

from legato import LLM, SamplingParams
from legato.checkpoint.loader import open_checkpoint
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL, EngineConfig, Kernels, ModelConfig, SchedulerConfig
from legato.engine.prompts import TokensPrompt
from legato.text.tokenizer import load_tokenizer

_LENGTHS = {DEFAULT_MODEL: (1024, 2048, 4096, 8000), "random, small": (16_384, 65_000)}
_WAYS = {
    "chunks of 512": SchedulerConfig(),
    "one piece": SchedulerConfig(enable_chunked_prefill=False),
}
_LONGEST = 65_536
_VALUE_BYTES = 2


class Measured(msgspec.Struct, frozen=True):
    """Attributes: peak_bytes: beyond what was resident before, keys and values not counted."""

    model: str
    num_tokens: int
    way: str
    peak_bytes: int


def main() -> None:
    arguments = _parse()
    console = Console(highlight=False)
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder, console.status("making a model") as status:
        _save_small_model(folder)
        for name, lengths in _LENGTHS.items():
            model = ModelConfig(
                model=DEFAULT_MODEL if name == DEFAULT_MODEL else folder, kernels=arguments.kernels
            )
            for num_tokens in lengths:
                for way, scheduler in _WAYS.items():
                    status.update(f"{name}: {num_tokens:,} tokens, {way}")
                    config = EngineConfig(model=model, scheduler=scheduler)
                    peak_bytes = _in_new_process(config, num_tokens)
                    measured.append(Measured(name, num_tokens, way, peak_bytes))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "memory.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(measured)))
    _plot(measured, arguments.out / "memory.png")
    console.print(_table(measured))
    console.print(f"written to {path} and {arguments.out}/memory.png")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", choices=get_args(Kernels), default="auto")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def _save_small_model(folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_LONGEST,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer = load_tokenizer(resolve_source(DEFAULT_MODEL, None))
    tokenizer.backend.save(f"{folder}/tokenizer.json")


def _in_new_process(config: EngineConfig, num_tokens: int) -> int:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(_peak_bytes, config, num_tokens).result()


def _peak_bytes(config: EngineConfig, num_tokens: int) -> int:
    llm, params = LLM.from_config(config), SamplingParams(max_tokens=1)

    def run(length: int) -> None:
        prompt = TokensPrompt(prompt_token_ids=[100 + i % 1000 for i in range(length)])
        llm.generate([prompt], params, use_tqdm=False)

    run(16)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _resident_bytes("VmRSS")
    run(num_tokens)
    spec = open_checkpoint(config.model).spec
    kept_values = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * num_tokens
    return _resident_bytes("VmHWM") - before - _VALUE_BYTES * kept_values


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _table(measured: list[Measured]) -> Table:
    table = Table("model", "prompt", *_WAYS)
    for name, lengths in _LENGTHS.items():
        for num_tokens in lengths:
            peaks = [
                m.peak_bytes for m in measured if (m.model, m.num_tokens) == (name, num_tokens)
            ]
            table.add_row(name, f"{num_tokens:,}", *(f"{peak / 2**20:.0f} MiB" for peak in peaks))
    return table


def _plot(measured: list[Measured], path: Path) -> None:
    figure, axes = plt.subplots(1, len(_LENGTHS), figsize=(9, 3.5), layout="constrained")
    for plot, name in zip(axes, _LENGTHS, strict=True):
        for way in _WAYS:
            points = [m for m in measured if (m.model, m.way) == (name, way)]
            lengths, peaks = [p.num_tokens for p in points], [p.peak_bytes / 2**20 for p in points]
            plot.plot(lengths, peaks, marker="o", label=way)
        plot.set(title=name, xlabel="prompt (tokens)", ylabel="peak memory (MiB)", ylim=(0, None))
    axes[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
