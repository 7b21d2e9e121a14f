"""Attention alone, beside PyTorch's on caches in one piece."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu.clock import median_in_graph_s
from benchmarks.gpu.figures import Report, Row
from benchmarks.gpu.parts.ceilings import known_roofline
from benchmarks.gpu.settings import Settings
from legato.checkpoint.loader import open_checkpoint
from legato.core.cache_config import BLOCK_SIZES
from legato.gpu.kernels.attention import attend
from legato.gpu.kernels.attention_parts import make_scratch
from legato.gpu.work_items import Tiling, TokenSpan, section_size, work_lists, write_work
from legato.model.spec import DecoderSpec
from legato_lab.work import MeasuredRates, Work

_BLOCK_SIZE = BLOCK_SIZES["cuda"]
_TOLERANCE = 2e-2
"""Between two ways to compute in bfloat16."""


TITLE = "Attention"


def run(settings: Settings, report: Report) -> None:
    sizes, roofline = settings.sizes, known_roofline(settings)
    checkpoint = open_checkpoint(settings.engine().model)
    cases = [(count, 1, sizes.context) for count in sizes.streams]
    cases.append((1, 1, sizes.prompt))
    cases += [(1, chunk, 0) for chunk in sizes.chunks]
    cases += [(1, chunk, sizes.mixed_start) for chunk in sizes.mixed]
    report.note(
        "One layer. PyTorch's `scaled_dot_product_attention` reads caches in one piece; "
        "Legato's kernel reads blocks that lie anywhere. Both are compared: their results "
        f"may differ by no more than {_TOLERANCE:g}, absolute and relative."
    )
    assert isinstance(checkpoint.spec, DecoderSpec)
    for count, num_rows, start in cases:
        case = AttentionCase(
            checkpoint.spec, checkpoint.dtype, settings.torch_device, count, num_rows, start
        )
        report.add(*case.rows(roofline))


class AttentionCase:
    """`count` requests of `num_rows` new tokens each, from position `start` on (decodes: the last).

    Attributes:
        query: [T, H, D].
        keys, values: [R, K, N, D], in one piece.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        count: int,
        num_rows: int,
        start: int,
    ) -> None:
        self._spec, self._device = spec, device
        self._count, self._num_rows = count, num_rows
        self._start = start - 1 if num_rows == 1 else start
        self._end = self._start + num_rows
        made = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made, dtype=dtype, device=device)

        self.query = random(count * num_rows, spec.num_heads, spec.head_dim)
        self.keys, self.values = random(
            2, count, spec.num_kv_heads, self._end, spec.head_dim
        ).unbind()

    def rows(self, roofline: MeasuredRates) -> list[Row]:
        """Both ways, compared."""
        ours, theirs = self.paged(), self.whole()
        torch.testing.assert_close(ours(), theirs(), atol=_TOLERANCE, rtol=_TOLERANCE)
        least = 1e6 * roofline.least_s(self._work)
        return [
            Row(
                name=f"{who}: {self._name}",
                value=1e6 * median_in_graph_s(call, self._device),
                unit="µs",
                least=least,
            )
            for who, call in (("Legato", ours), ("PyTorch", theirs))
        ]

    def whole(self) -> Callable[[], torch.Tensor]:
        """PyTorch's."""
        spec = self._spec
        query = self.query.view(self._count, self._num_rows, spec.num_heads, spec.head_dim)
        query = query.transpose(1, 2).contiguous()  # [R, H, N, D]
        mask = None if self._num_rows == 1 else causal_lower_right(self._num_rows, self._end)

        def call() -> torch.Tensor:
            out = F.scaled_dot_product_attention(
                query, self.keys, self.values, attn_mask=mask, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(self.query.shape)

        return call

    def paged(self) -> Callable[[], torch.Tensor]:
        """Legato's, over the same in blocks whose order is random."""
        key_cache, value_cache, table = self._blocks()
        tiling = Tiling(
            self._spec.num_heads,
            self._spec.num_kv_heads,
            self._num_processors,
            has_wide=self.query.dtype != torch.float32,
        )
        shape = tiling.shape(len(self.query), has_chunks=self._num_rows > tiling.narrow_rows)
        section = np.zeros(section_size(shape), dtype=np.int32)
        spans = [
            TokenSpan(i, i * self._num_rows, self._num_rows, self._start)
            for i in range(self._count)
        ]
        write_work(section, shape, spans, None)
        work = work_lists(torch.from_numpy(section).to(self._device), shape)
        scratch = make_scratch(
            shape,
            num_heads=self._spec.num_heads,
            head_dim=self._spec.head_dim,
            device=self._device,
        )
        out = torch.empty_like(self.query)

        def call() -> torch.Tensor:
            return attend(
                self.query,
                key_cache,
                value_cache,
                table,
                work,
                out,
                scratch,
                scale=self._spec.head_dim**-0.5,
                sliding_window=None,
            )

        return call

    def _blocks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values [blocks, K, block, D], and the table int32 [R, blocks of a request]."""
        num_each = -(-self._end // _BLOCK_SIZE)
        places = torch.randperm(self._count * num_each, device=self._device)
        caches = []
        for whole in (self.keys, self.values):
            padded = F.pad(whole, (0, 0, 0, num_each * _BLOCK_SIZE - self._end))
            blocks = (
                padded.view(*padded.shape[:2], num_each, _BLOCK_SIZE, -1)
                .transpose(1, 2)
                .flatten(0, 1)
            )
            cache = torch.empty_like(blocks, memory_format=torch.contiguous_format)
            cache[places] = blocks
            caches.append(cache)
        return caches[0], caches[1], places.view(self._count, num_each).int()

    @property
    def _name(self) -> str:
        if self._num_rows == 1:
            return f"{self._count} decodes at {self._end:,}"
        return f"{self._num_rows:,} rows at {self._start:,}"

    @property
    def _work(self) -> Work:
        spec, rows = self._spec, self._num_rows
        pairs = self._count * rows * (self._start + (rows + 1) / 2)
        return Work(
            num_bytes=self.keys.nbytes + self.values.nbytes,
            num_flops=4 * spec.num_heads * spec.head_dim * pairs,
        )

    @property
    def _num_processors(self) -> int:
        if self._device.type != "cuda":
            return 4
        return torch.cuda.get_device_properties(self._device).multi_processor_count
