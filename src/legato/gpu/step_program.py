"""A step's work on the device: a function of the step's size, at fixed addresses."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from legato.executor.adjustments import LogitAdjuster
from legato.executor.logprobs import Scores, score
from legato.executor.sequence import SamplingRow
from legato.executor.state_cache import StateCache
from legato.gpu.decoder import DecoderMemory, GpuDecoder, GpuLayerCache
from legato.gpu.device import Device
from legato.gpu.kernels.attention_parts import make_scratch
from legato.gpu.sampler import sample
from legato.gpu.step_inputs import Layout, LoadedStep, StepInputs, StepSize
from legato.gpu.work_items import Tiling, WorkCounts, has_wide_tiles
from legato.model.model import CacheGroup


class Runner(Protocol):
    """Runs the two parts of a step, from graphs or kernel by kernel.

    The executor does the work between the two parts, on the device and on the host.
    """

    def size(self, num_rows: int, num_samples: int, *, has_chunks: bool) -> StepSize:
        """Return the size at which a step of so many rows and sampled rows is computed."""
        ...

    def forward(self, step: LoadedStep) -> None:
        """See `StepProgram.forward`."""
        ...

    def sample(self, size: StepSize) -> None:
        """See `StepProgram.sample`."""
        ...


class LayerGroup(NamedTuple):
    """What steps know of the layers of a cache group.

    Attributes:
        window: the widest of any layer; None if a layer sees all keys.
    """

    tiling: Tiling
    window: int | None

    @classmethod
    def of(cls, group: CacheGroup, model: GpuDecoder, num_processors: int) -> "LayerGroup":
        cache, windows = group.cache, group.cache.sliding_windows
        tiling = Tiling(
            model.spec.num_heads,
            cache.num_kv_heads,
            num_processors,
            has_wide=has_wide_tiles(model.dtype, cache.head_dim),
        )
        window = None if None in windows else max(window or 0 for window in windows)
        return cls(tiling, window)


class StepProgram:
    """The memory of steps on the device, and their work.

    It is also a `Runner` without padding and graphs.

    Args:
        groups: of the cache.
        blocks: of each group, laid out as `CacheSpec` says, with a head's tokens in order.
        states: of the recurrent layers; None if the model has none.
        num_slots: S, requests with rows in the device's tables.
        max_blocks: of one request.
        max_rows: P of the largest step.
        max_samples: Q of the largest step.

    Attributes:
        block_table: int32 [groups, S + 1, max_blocks]; the last row is for padding.
        words: int32, the inputs of the next step (`Layout`).
        residual: float32 [max_rows, E], the residual stream after the last layer.
        logits: [max_samples, V] in the model's dtype.
        last_token: int32 [S + 1], the last token of each request.
        sampled: int32 [max_samples]; `legato.gpu.sampler.check_sampled` lists its values.
    """

    def __init__(
        self,
        model: GpuDecoder,
        groups: Sequence[CacheGroup],
        blocks: Sequence[torch.Tensor],
        device: Device,
        *,
        block_size: int,
        num_slots: int,
        max_blocks: int,
        max_rows: int,
        max_samples: int,
        states: StateCache | None = None,
    ) -> None:
        spec, place = model.spec, device.torch_device
        assert bool(spec.states) == (states is not None)
        ints = partial(torch.zeros, dtype=torch.int32, device=place)
        self.model, self.blocks, self.block_size = model, blocks, block_size
        self.states, self.num_slots = states, num_slots
        self.max_rows, self.max_samples = max_rows, max_samples
        self.groups = [LayerGroup.of(group, model, device.num_processors) for group in groups]
        self._adjuster = LogitAdjuster(device.upload)
        self.max_words = self.layout(StepSize(max_rows, max_samples, True)).num_words
        self.words = ints(self.max_words)
        self.block_table = ints(len(groups), num_slots + 1, max_blocks)
        self.last_token = ints(num_slots + 1)
        self.sampled = ints(max_samples)
        self.residual = torch.zeros(max_rows, spec.hidden_size, device=place)
        self.logits = torch.zeros(max_samples, spec.vocab_size, dtype=model.dtype, device=place)
        caches: dict[int, GpuLayerCache] = {}
        for index, (group, own, table) in enumerate(
            zip(groups, blocks, self.block_table, strict=True)
        ):
            cache = group.cache
            scratch = make_scratch(
                self.groups[index].tiling.shape(max_rows, has_chunks=True),
                num_heads=spec.num_heads,
                head_dim=cache.head_dim,
                device=place,
            )
            heads = own.view(*own.shape[:3], cache.num_kv_heads, block_size, -1)
            for layer, (keys, values) in zip(group.layers, heads, strict=True):
                caches[layer] = GpuLayerCache(index, keys, values, table, scratch)
        self._memory = DecoderMemory(
            [caches[layer] for layer in range(len(caches))],
            self.last_token,
            () if states is None else states.layers,
        )

    def size(self, num_rows: int, num_samples: int, *, has_chunks: bool) -> StepSize:
        return StepSize(num_rows, num_samples, has_chunks)

    @property
    def most_rows_without_chunks(self) -> int:
        """Most rows of each request in a step of a size without chunks."""
        if self.states is not None:
            return 1
        return min(group.tiling.narrow_rows for group in self.groups)

    @property
    def largest(self) -> StepSize:
        return StepSize(self.max_rows, self.max_samples, has_chunks=True)

    def layout(self, size: StepSize) -> Layout:
        max_runs = None if self.states is None else self.num_slots
        tilings = [group.tiling for group in self.groups]
        return Layout.of(size, tilings, self.max_samples, max_runs)

    def inputs(self, size: StepSize, work_counts: Sequence[WorkCounts] | None = None) -> StepInputs:
        return self.layout(size).views(self.words, work_counts)

    def forward(self, step: LoadedStep) -> None:
        """Compute `residual` from `words`, and the logits of the sampled rows."""
        self.layers(*step)
        self.head(step.size)

    def layers(
        self,
        size: StepSize,
        work_counts: Sequence[WorkCounts] | None = None,
        *,
        num_layers: int | None = None,
    ) -> None:
        """Compute `residual` from `words`; only `head` and `sample` depend on the sampled rows.

        Args:
            work_counts: as of `Layout.views`.
        """
        inputs, residual = self.inputs(size, work_counts), self.residual[: size.num_rows]
        self.model.compute_step(inputs, self._memory, residual, num_layers=num_layers)

    def head(self, size: StepSize) -> None:
        """Compute logits of the sampled rows from `residual`; independent of the number of rows."""
        if size.num_samples:
            hidden = self.model.hidden_of(self.inputs(size).sample_rows, self.residual)
            self.model.write_logits(hidden, self.logits[: size.num_samples])

    def adjusted(self, num_samples: int, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Return a copy of the first `logits` as float32, the first rows adjusted as `rows` ask."""
        adjusted = self.logits[:num_samples].to(torch.float32, copy=True)
        self._adjuster.adjust(adjusted, rows)
        return adjusted

    def scores(
        self, rows: torch.Tensor, num_top: int, listed: torch.Tensor | None = None
    ) -> Scores:
        """Return log probabilities of sampled rows, int64 [N], and of their likeliest tokens.

        Args:
            listed: as of `score`.
        """
        tokens = self.sampled.index_select(0, rows).to(torch.int64).clamp_(min=0)
        return score(self.logits.index_select(0, rows).float(), tokens, num_top, listed)

    def sample(self, size: StepSize, *, adjusted: torch.Tensor | None = None) -> None:
        """Compute `sampled` and `last_token` from `logits`.

        Args:
            adjusted: [Q, V], the logits after adjustments; None without any.
        """
        if not size.num_samples:
            return
        inputs = self.inputs(size)
        sample(
            self.logits[: size.num_samples],
            inputs.sampling,
            inputs.sample_slots,
            self.last_token,
            self.sampled[: size.num_samples],
            adjusted=adjusted,
        )
