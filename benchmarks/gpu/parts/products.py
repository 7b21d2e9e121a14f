"""The products of one MLP alone, with each kind of weights."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu.clock import median_in_graph_s
from benchmarks.gpu.figures import Report, Row
from benchmarks.gpu.parts.ceilings import known_roofline
from benchmarks.gpu.settings import Settings
from legato.checkpoint.loader import open_checkpoint
from legato.core.errors import ConfigError
from legato.gpu.linear import Fp8Linear, QuantizedLinear, rounded
from legato.gpu.weights import check_fp8
from legato.model.mlp_spec import MlpSpec
from legato.model.quantization import quantize
from legato_lab.work import Work

_SCALE_BITS = 1
"""A weight's share of a scale and a minimum in float16, for 32 weights."""

TITLE = "Products"


class _Way(NamedTuple):
    name: str
    num_bits: int
    layers: list[Callable[[torch.Tensor], torch.Tensor]]

    def run(self, rows: torch.Tensor) -> None:
        for layer in self.layers:
            layer(rows)


def run(settings: Settings, report: Report) -> None:
    checkpoint = open_checkpoint(settings.engine().model)
    spec = checkpoint.decoder_spec
    size = next((own.mlp.size for own in spec.layers if isinstance(own.mlp, MlpSpec)), None)
    if size is None:
        report.note("All MLPs have experts: see that part.")
        return
    report.note(
        "Two equal matrices in turn, so that a cache does not hold one. The roofline is of the "
        "bytes that each kind of weights has, and of bfloat16's arithmetic."
    )
    roofline, device = known_roofline(settings), settings.torch_device
    for num_outputs, depth in ((2 * size, spec.hidden_size), (spec.hidden_size, size)):
        for way in _ways(num_outputs, depth, checkpoint.dtype, device):
            for num_rows in settings.sizes.streams:
                rows = torch.randn(num_rows, depth, device=device).to(checkpoint.dtype)
                work = Work(
                    num_bytes=num_outputs * depth * way.num_bits / 8,
                    num_flops=2 * num_rows * num_outputs * depth,
                )
                report.add(
                    Row(
                        name=f"{way.name}: {num_rows:,} x {depth:,} to {num_outputs:,}",
                        value=1e6
                        * median_in_graph_s(partial(way.run, rows), device)
                        / len(way.layers),
                        unit="µs",
                        least=1e6 * roofline.least_s(work),
                    )
                )


def _ways(num_outputs: int, depth: int, dtype: torch.dtype, device: torch.device) -> Iterator[_Way]:
    made = torch.Generator(device).manual_seed(0)
    weights = [
        torch.randn(num_outputs, depth, generator=made, device=device) * depth**-0.5
        for _ in range(2)
    ]
    plain = [partial(F.linear, weight=weight.to(dtype)) for weight in weights]
    yield _Way("plain", 8 * dtype.itemsize, [*plain])
    for bits in (8, 4):
        layers = [QuantizedLinear(quantize(weight, bits), None, device) for weight in weights]
        yield _Way(f"{bits} bits", bits + _SCALE_BITS, [*layers])
    try:
        check_fp8(dtype, device)
    except ConfigError:
        return
    yield _Way("fp8", 8, [Fp8Linear(*rounded(weight.to(dtype)), None) for weight in weights])
