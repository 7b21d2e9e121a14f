"""Compares native kernels with PyTorch's float32 before a model runs on them.

A kernel that is wrong for some row counts returns wrong numbers, not an error. Only a comparison on
both sides of every edge of its blocks and tiles finds it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import msgspec
import torch

from legato.core.plan import ScheduledChunk
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.attention.native_backend import BLOCK_MULTIPLE, NativeAttentionBackend
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.batch import pack
from legato.executor.sequence import SequenceState
from legato.model.decoder import Decoder
from legato.model.decoder_layer import make_recurrence
from legato.model.mixer_spec import (
    AttentionSpec,
    DeltaNetSpec,
    Mamba2Spec,
    RecurrenceSpec,
    ShortConvSpec,
)
from legato.model.mlp_spec import MlpSpec
from legato.model.model import Model
from legato.model.native_kernels import NativeKernels
from legato.model.native_model import NativeModel
from legato.model.native_operators import NativeLinear
from legato.model.native_recurrence import NativeMixer
from legato.model.quantization import (
    FLOAT8_TABLE,
    QuantizedWeight,
    plain,
    quantize,
    quantize_rotated,
)
from legato.model.recurrence import PIECE, RecurrentMixer
from legato.model.rope import RopeFrequencies
from legato.model.spec import DecoderSpec, LayerSpec
from legato.model.states import StateRun, StepStates, make_states

START_COUNTS = (*range(1, 35), 47, 48, 49, 63, 64, 65)
"""Row counts on both sides of every edge: blocks of 6 and 8 rows, tiles of 16, strips of 32."""
ALL_COUNTS = tuple(range(1, 131))

_MOST_ERROR = 0.1
"""Limit of a row's error, relative to the row's norm. Rounding causes up to 0.03, a kernel that
reads the wrong rows about 1."""

_UNEVEN_TABLE = torch.tensor([-12.0, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12, 14]) / 2

_OUTPUTS, _DEPTH = 72, 128
_CPU = torch.device("cpu")
_EARLIER = 19
"""Tokens cached before the compared chunk: an odd number."""

_SPEC = DecoderSpec(
    vocab_size=64,
    hidden_size=64,
    max_model_len=256,
    norm_eps=1e-5,
    ropes=(RopeFrequencies(tuple(0.5**i for i in range(16)), 1.0),),
    layers=(
        LayerSpec(
            attention=AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=32, scale=32**-0.5),
            mlp=MlpSpec(size=64),
        ),
    ),
    tie_word_embeddings=True,
)
"""One query head for each key/value head, so that a chunk has as many query rows as tokens."""

_MIXERS: dict[str, RecurrenceSpec] = {
    "short convolutions": ShortConvSpec(num_channels=64, kernel_size=3, has_bias=True),
    "delta nets": DeltaNetSpec(num_heads=2, num_key_heads=1, key_dim=16, value_dim=32),
    "Mamba-2": Mamba2Spec(num_heads=2, num_groups=1, head_dim=32, state_size=16),
}
"""Key the mixers' name in messages."""
_MOST_MIXER_ERROR = 1e-3
"""Mixers compute in float32, and rounding causes errors up to 1e-5."""


@dataclass(frozen=True)
class KernelChoice:
    """The kernels that a model runs on.

    Attributes:
        instructions: the first candidate that agrees with PyTorch; None if none does.
        rejected: earlier candidates; key the set of instructions, value how its kernels disagree.
    """

    instructions: str | None
    rejected: dict[str, str]


def choose_kernels(candidates: Iterable[str]) -> KernelChoice:
    """Return the first set of kernels that agrees with PyTorch.

    Args:
        candidates: sets of instructions that this processor has, the best first.
    """
    rejected: dict[str, str] = {}
    for instructions in candidates:
        disagreement = first_disagreement(instructions)
        if disagreement is None:
            return KernelChoice(instructions, rejected)
        rejected[instructions] = disagreement
    return KernelChoice(None, rejected)


@cache
def first_disagreement(instructions: str) -> str | None:
    """Return what the kernels of a set of instructions get wrong first, None if nothing.

    Computed once in a process, however many engines it has: neither the kernels nor the processor
    change.
    """
    return next(disagreements(NativeKernels(1, instructions), START_COUNTS), None)


@torch.inference_mode()
def disagreements(kernels: NativeKernels, row_counts: Sequence[int]) -> Iterator[str]:
    """Yield each product, attention and mixer that differs from PyTorch's, with its error."""
    generator = torch.Generator().manual_seed(0)
    yield from chain(
        _wrong_products(kernels, row_counts, generator),
        _wrong_attention(kernels, row_counts, generator),
        _wrong_mixers(kernels, row_counts, generator),
    )


def _wrong_products(
    kernels: NativeKernels, row_counts: Sequence[int], generator: torch.Generator
) -> Iterator[str]:
    values = torch.randn(_OUTPUTS, _DEPTH, generator=generator).bfloat16()
    rows = torch.randn(max(row_counts), _DEPTH, generator=generator).bfloat16()
    for name, weight in _forms(values).items():
        exact = rows.float() @ plain(weight).float().T
        linear = NativeLinear(weight, kernels)
        for count in row_counts:
            if problem := _problem(linear(rows[:count]), exact[:count]):
                yield f"products of {count} rows with {name} weights are {problem}"


def _forms(values: torch.Tensor) -> dict[str, torch.Tensor | QuantizedWeight]:
    """Return a matrix in each form that kernels multiply with; key the form's name."""
    order = torch.arange(values.shape[1], dtype=torch.int32).flip(0)
    return {
        "bfloat16": values,
        "int8": quantize(values, 8),
        "int4": quantize(values, 4),
        "stored int4": replace(quantize(values, 4), is_stored_only=True),
        "reordered int4": replace(quantize(values, 4), order=order),
        "int4 in groups of 16": _rounded(values, group=16, bits=4),
        "int8 in groups of 16": _rounded(values, group=16, bits=8),
        "int4 in groups of 64": _rounded(values, group=64, bits=4),
        "table": _rounded(values, group=32, bits=4, table=torch.arange(-120.0, 121.0, 16.0)),
        "table in groups of 16": _rounded(values, group=16, bits=4, table=_UNEVEN_TABLE),
        "float8": _float8(values),
        "w8a8": quantize_rotated(values),
        "w4a8": replace(quantize(values, 4), rounds_rows=True),
    }


def _rounded(
    values: torch.Tensor, *, group: int, bits: int, table: torch.Tensor | None = None
) -> QuantizedWeight:
    """Round a matrix to the nearest numbers of a table or of so many bits, without minima."""
    zero = 0 if table is not None else 2 ** (bits - 1)
    numbers = torch.arange(2.0**bits) - zero if table is None else table
    groups = values.float().reshape(len(values), -1, group)
    scales = groups.abs().amax(dim=-1) / numbers.max()
    codes = torch.bucketize(groups / scales[..., None], (numbers[1:] + numbers[:-1]) / 2)
    return QuantizedWeight(
        codes.to(torch.uint8).flatten(1), scales, None, bits, zero=zero, table=table
    )


def _float8(values: torch.Tensor) -> QuantizedWeight:
    floats = values.to(torch.float8_e4m3fn)
    scales = torch.full((len(values), 1), 0.75)
    return QuantizedWeight(floats.view(torch.uint8), scales, None, 8, table=FLOAT8_TABLE)


def _wrong_attention(
    kernels: NativeKernels, row_counts: Sequence[int], generator: torch.Generator
) -> Iterator[str]:
    """Compare chunks after `_EARLIER` cached tokens with one pass over the same tokens."""
    decoder = Decoder(_SPEC, dtype=torch.float32, device=_CPU)
    for name, weight in decoder.named_parameters():
        values = 0.15 * torch.randn(weight.shape, generator=generator)
        weight.copy_((values + float("norm" in name)).bfloat16())
    native = NativeModel(_SPEC, kernels)
    native.load_weights(decoder.checkpoint_slots().items())
    num_blocks = -(-(_EARLIER + max(row_counts)) // BLOCK_MULTIPLE)
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK_MULTIPLE}
    torch_attention = TorchAttentionBackend(decoder.cache, **sizes, device=_CPU)
    exact = _hidden(decoder, torch_attention, 0, _EARLIER + max(row_counts))[_EARLIER:]
    for is_quantized in (False, True):
        cache = replace(native.cache, is_quantized=is_quantized)
        attention = NativeAttentionBackend(native, cache, **sizes)
        _hidden(native, attention, 0, _EARLIER)
        for count in row_counts:
            got = _hidden(native, attention, _EARLIER, count)
            if problem := _problem(got, exact[:count]):
                keys = "int8" if is_quantized else "bfloat16"
                yield f"attention of {count} rows to {keys} keys is {problem}"


def _wrong_mixers(
    kernels: NativeKernels, row_counts: Sequence[int], generator: torch.Generator
) -> Iterator[str]:
    """Compare runs that begin shortly before a piece ends, and a token after each, with one run."""
    start = PIECE - 3
    for name, spec in _MIXERS.items():
        mixer = _random_mixer(spec, generator)
        hidden = torch.randn(1 + max(row_counts), _SPEC.hidden_size, generator=generator)
        [layer] = make_states([spec.state], 4, torch.float32, _CPU)
        for part in layer:
            part[:1].normal_(generator=generator)
        exact = mixer(hidden, StepStates([layer], [StateRun(0, len(hidden), start, 0, 3)]))
        mixer.native = NativeMixer(mixer, kernels)
        for count in row_counts:
            runs = StateRun(0, count, start, 0, 1), StateRun(0, 1, start + count, 1, 2)
            rows = hidden[:count], hidden[count : count + 1]
            got = torch.cat(
                [
                    mixer(own, StepStates([layer], [run]))
                    for own, run in zip(rows, runs, strict=True)
                ]
            )
            if problem := _problem(got, exact[: count + 1], _MOST_MIXER_ERROR):
                yield f"{name} over {count} rows are {problem}"


def _random_mixer(spec: RecurrenceSpec, generator: torch.Generator) -> RecurrentMixer:
    attention = _SPEC.attentions[0]
    layers = (
        LayerSpec(attention=attention, mlp=MlpSpec(size=32)),
        LayerSpec(attention=None, recurrence=spec, mlp=MlpSpec(size=32)),
    )
    mixer = make_recurrence(msgspec.structs.replace(_SPEC, layers=layers), 1, torch.empty)
    for weight in mixer.parameters():
        scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.3
        weight.normal_(0.0, scale, generator=generator)
    return mixer


def _hidden(model: Model, attention: AttentionBackend, start: int, count: int) -> torch.Tensor:
    """Return the layer's hidden states of tokens [start, start + count), without padding."""
    end = start + count
    request = AddRequest(
        request_id="check",
        prompt_token_ids=token_array((7 * i * i + 3 * i) % _SPEC.vocab_size for i in range(end)),
        params=SamplingParams(max_tokens=1),
    )
    blocks = tuple(range(-(-end // BLOCK_MULTIPLE)))
    chunk = ScheduledChunk(request.request_id, start, count, blocks, 1, "prefill")
    batch = pack(
        [chunk],
        [SequenceState(request)],
        block_size=BLOCK_MULTIPLE,
        device=_CPU,
        padding=model.rows,
    )
    return model.forward(batch.input_ids, batch.positions, attention.begin_step(batch))[:count]


def _problem(got: torch.Tensor, exact: torch.Tensor, most_error: float = _MOST_ERROR) -> str:
    """Describe the worst row's error; empty if it is small enough."""
    errors = (got - exact).norm(dim=1) / exact.norm(dim=1)
    if bool((errors <= most_error).all()):
        return ""
    worst = int(errors.nan_to_num(nan=torch.inf).argmax())
    return f"wrong: row {worst} is off by {float(errors[worst]):.2g} of its length"
