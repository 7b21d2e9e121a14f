"""PyTorch alone at its best for decodes."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu.clock import captured, median_s
from benchmarks.gpu.figures import Report, Row
from benchmarks.gpu.settings import Settings
from legato.checkpoint.loader import open_checkpoint
from legato.model.decoder import Decoder
from legato.model.model import StepAttention
from legato.model.spec import DecoderSpec

TITLE = "A static batch of PyTorch's"


def run(settings: Settings, report: Report) -> None:
    report.note(
        "A static batch decodes a token for each of as many requests of the same length, with "
        "scaled_dot_product_attention over caches in one piece, cuBLAS, and one CUDA graph: "
        "nothing is scheduled, paged or sampled but by argmax."
    )
    for row in _static_batches(settings):
        report.add(row)


def _static_batches(settings: Settings) -> Iterator[Row]:
    checkpoint, device = open_checkpoint(settings.engine().model), settings.torch_device
    assert isinstance(checkpoint.spec, DecoderSpec)
    model = Decoder(checkpoint.spec, dtype=checkpoint.dtype, device=device)
    model.load_weights(checkpoint.tensors(device))
    for count in settings.sizes.streams:
        step_s = _static_step_s(model, count, settings.sizes.context, device)
        name = f"static batch of PyTorch: {count} at {settings.sizes.context:,}"
        yield Row(name=name, value=1e3 * step_s, unit="ms")


@torch.inference_mode()
def _static_step_s(model: Decoder, count: int, context: int, device: torch.device) -> float:
    attention = StaticAttention(model, count, context)
    token_ids = torch.ones(count, dtype=torch.int64, device=device)
    positions = torch.full_like(token_ids, context - 1)

    def step() -> None:
        hidden = model(token_ids, positions, attention)
        token_ids.copy_(model.compute_logits(hidden).argmax(dim=-1))

    return median_s(captured(step, device) if device.type == "cuda" else step, device)


class StaticAttention(StepAttention):
    """Decodes of as many requests, each with `context` tokens in a cache of its own."""

    def __init__(self, model: Decoder, count: int, context: int) -> None:
        cache = model.cache
        shape = (cache.num_layers, 2, count, cache.num_kv_heads, context, cache.head_dim)
        self._cache = torch.zeros(shape, dtype=cache.dtype, device=model.device)
        for layer in self._cache:
            layer.normal_()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        *,
        scale: float,
        sliding_window: int | None,
        is_chunked: bool = False,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "peers' models have no sinks"
        assert key is not None
        assert value is not None
        assert sliding_window is None, "a static batch has no windows"
        assert not is_chunked, "and no chunks"
        assert softcap is None, "peers' models have no soft caps"
        keys, values = self._cache[layer]  # [R, K, N, D]
        keys[:, :, -1], values[:, :, -1] = key, value
        context = F.scaled_dot_product_attention(
            query[:, :, None], keys, values, scale=scale, enable_gqa=True
        )
        return context[:, :, 0]
