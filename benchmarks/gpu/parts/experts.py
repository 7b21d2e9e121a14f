"""The experts of one layer alone, beside PyTorch's products, one expert after another."""

from collections.abc import Callable

import msgspec
import torch

from benchmarks.gpu.clock import median_in_graph_s
from benchmarks.gpu.figures import Report, Row
from benchmarks.gpu.parts.ceilings import known_roofline
from benchmarks.gpu.settings import Settings
from legato.checkpoint.loader import open_checkpoint
from legato.gpu.experts import GpuExperts, codes_of
from legato.gpu.kernels.experts import ExpertWeights
from legato.model.experts import Experts
from legato.model.mlp_spec import MoeSpec
from legato.model.quantization import quantize
from legato.model.quantized_forms import in_blocks
from legato_lab.work import MeasuredRates, Work

_HIDDEN_SIZE = 2048
_QWEN3_30B_A3B = MoeSpec(num_experts=128, num_active=8, size=768)
_TOLERANCE = 2e-2
"""Between two ways to compute in bfloat16."""
_BITS, _SCALE_BITS = 4, 1
"""Of a weight's code, and its share of a scale and a minimum."""

TITLE = "Experts"


def run(settings: Settings, report: Report) -> None:
    sizes, roofline = settings.sizes, known_roofline(settings)
    checkpoint = open_checkpoint(settings.engine().model)
    spec = checkpoint.decoder_spec
    moe = next((own for layer in spec.layers if (own := layer.moe) is not None), None)
    size = _HIDDEN_SIZE if moe is None else spec.hidden_size
    layer = ExpertLayer(moe or _QWEN3_30B_A3B, size, checkpoint.dtype, settings.torch_device)
    report.note(
        f"One layer of {layer.moe.num_experts} experts, {layer.moe.num_active} a row, of "
        f"{size:,} x {layer.moe.size:,}, all as likely, without biases. PyTorch's products are "
        "told how many rows each expert has. Both are compared: their results may differ by no "
        f"more than {_TOLERANCE:g}, absolute and relative."
    )
    for num_rows in (*sizes.streams, *sorted(sizes.chunks)):
        report.add(*layer.rows(num_rows, roofline))


class ExpertLayer:
    """Random experts, and their codes."""

    def __init__(
        self, moe: MoeSpec, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.moe = msgspec.structs.replace(moe, has_bias=False)
        self._size, self._dtype, self._device = hidden_size, dtype, device
        self._made = torch.Generator(device).manual_seed(0)
        self._plain = Experts(self.moe, hidden_size, self._random)
        matrices = self._plain.gate_up_proj, self._plain.down_proj
        self._whole = GpuExperts(self._plain, *map(ExpertWeights, matrices))
        self._coded = GpuExperts(self._plain, *map(self._codes, matrices))

    def rows(self, num_rows: int, roofline: MeasuredRates) -> list[Row]:
        """All ways for so many rows, the first two compared."""
        moe = self.moe
        rows = self._random(num_rows, self._size) * self._size**0.5
        order = self._uniform(num_rows, moe.num_experts).argsort(1)
        picked = order[:, : moe.num_active].contiguous()
        factors = self._uniform(*picked.shape)
        slots = torch.zeros(num_rows, dtype=torch.int32, device=self._device)

        def grouped(experts: GpuExperts) -> Callable[[], torch.Tensor]:
            return lambda: experts(rows, picked, factors, slots)

        ours, theirs = grouped(self._whole), self._one_by_one(rows, picked, factors)
        torch.testing.assert_close(ours(), theirs(), atol=_TOLERANCE, rtol=_TOLERANCE)
        ways = {
            "Legato": (ours, 8 * self._dtype.itemsize),
            "PyTorch": (theirs, 8 * self._dtype.itemsize),
            f"Legato, {_BITS} bits": (grouped(self._coded), _BITS + _SCALE_BITS),
        }
        return [
            Row(
                name=f"{name}: {num_rows:,} row" + "s" * (num_rows > 1),
                value=1e6 * median_in_graph_s(call, self._device),
                unit="µs",
                least=1e6 * roofline.least_s(self._work(picked, num_bits)),
            )
            for name, (call, num_bits) in ways.items()
        ]

    def _one_by_one(
        self, rows: torch.Tensor, picked: torch.Tensor, factors: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        order = picked.flatten().argsort(stable=True)
        counts = picked.flatten().bincount(minlength=self.moe.num_experts).tolist()
        source = order // self.moe.num_active

        def call() -> torch.Tensor:
            outputs = self._plain(rows[source], counts)
            by_pair = torch.empty_like(outputs)
            by_pair[order] = outputs
            return (by_pair.view(*picked.shape, -1) * factors[..., None]).to(rows.dtype)

        return call

    def _work(self, picked: torch.Tensor, num_bits: int) -> Work:
        num_weights = 3 * self._size * self.moe.size
        return Work(
            num_bytes=len(set(picked.flatten().tolist())) * num_weights * num_bits / 8,
            num_flops=2 * picked.numel() * num_weights,
        )

    def _random(self, *shape: int) -> torch.Tensor:
        """Numbers whose sums over a row are about one."""
        values = torch.randn(shape, generator=self._made, dtype=self._dtype, device=self._device)
        scale: float = shape[-1] ** -0.5
        return values * scale

    def _uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._made, device=self._device)

    def _codes(self, matrices: torch.Tensor) -> ExpertWeights:
        blocks = in_blocks(quantize(matrices.detach().flatten(0, 1), _BITS))
        assert blocks is not None
        return codes_of(blocks, len(matrices), self._device)
