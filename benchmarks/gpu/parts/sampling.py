"""Sampling alone, with the settings that chats have."""

from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.clock import median_in_graph_s
from benchmarks.gpu.figures import Report, Row
from benchmarks.gpu.parts.ceilings import known_roofline
from benchmarks.gpu.settings import Settings
from legato.checkpoint.loader import open_checkpoint
from legato.core.sampling_params import SamplingParams
from legato.gpu.sampler import NUM_WORDS, SamplingInputs, SamplingTable, sample
from legato_lab.work import Work

_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "no filter": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-k and top-p": {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
}
_NUM_LIKELY = 40
"""Tokens that stand out, as a language model's do."""
_AHEAD = 14.0

TITLE = "Sampling"


def run(settings: Settings, report: Report) -> None:
    checkpoint, device = open_checkpoint(settings.engine().model), settings.torch_device
    vocab_size, roofline = checkpoint.spec.vocab_size, known_roofline(settings)
    report.note(
        f"Of {vocab_size:,} logits a row, {_NUM_LIKELY} stand out; where they are flat, none do. "
        "The roofline is of reading them once."
    )
    for num_rows in settings.sizes.streams:
        for is_flat in (False, True):
            logits = _logits(num_rows, vocab_size, checkpoint.dtype, device, is_flat=is_flat)
            for name, given in _KINDS.items():
                inputs = _inputs(SamplingParams(seed=0, **given), num_rows, device)
                slots = torch.arange(num_rows, dtype=torch.int32, device=device)
                last_token, sampled = torch.zeros(2, num_rows + 1, dtype=torch.int32, device=device)
                call = partial(sample, logits, inputs, slots, last_token, sampled[:-1])
                report.add(
                    Row(
                        name=f"{name}: {num_rows:,} row{'s' * (num_rows > 1)}{', flat' * is_flat}",
                        value=1e6 * median_in_graph_s(call, device),
                        unit="µs",
                        least=1e6 * roofline.least_s(Work(logits.nbytes, 0.0)),
                    )
                )


def _logits(
    num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device, *, is_flat: bool
) -> torch.Tensor:
    made = torch.Generator(device).manual_seed(0)
    place: dict[str, Any] = {"generator": made, "device": device}
    logits = 2.5 * torch.randn(num_rows, vocab_size, **place)
    if not is_flat:
        likely = torch.randint(vocab_size, (num_rows, _NUM_LIKELY), **place)
        logits.scatter_(1, likely, _AHEAD + 6.0 * torch.rand(num_rows, _NUM_LIKELY, **place))
    return logits.to(dtype)


def _inputs(params: SamplingParams, num_rows: int, device: torch.device) -> SamplingInputs:
    table = SamplingTable(num_rows)
    slots = np.arange(num_rows, dtype=np.int32)
    for slot in slots:
        table.put(int(slot), params)
    words = np.zeros(NUM_WORDS * num_rows, dtype=np.int32)
    table.write(words, slots, np.zeros(num_rows, dtype=np.int64))
    return SamplingInputs.of(torch.from_numpy(words).to(device))
