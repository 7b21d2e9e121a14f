"""Native layers against the Python ones in float32: random architectures, tables and chunks."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.core.plan import ScheduledChunk
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.attention.native_backend import NativeAttentionBackend
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.batch import pack
from legato.executor.sequence import SequenceState
from legato.executor.state_cache import StateCache
from legato.model.communicator import ALONE, Communicator
from legato.model.model import Model
from legato.model.native_kernels import NativeKernels, native_instructions
from legato.model.native_support import why_not_native
from legato.model.spec import DecoderSpec
from legato.model.states import StepStates
from tests.executor.instructions import TESTED
from tests.model.random_models import (
    SPECS,
    VOCAB_SIZE,
    decoder_spec,
    embedded_spec,
    native_model,
    random_decoder,
)
from tests.model.ranks import on_all_ranks
from tests.profiles import examples

CPU = torch.device("cpu")
BLOCK_SIZE = 32


pytestmark = pytest.mark.skipif(
    bool(why_not_native(SPECS["grouped"], torch.bfloat16, CPU)),
    reason=why_not_native(SPECS["grouped"], torch.bfloat16, CPU),
)


class Runner:
    """Runs the same plans on one model; `logits` are of all rows, step by step."""

    def __init__(
        self, model: Model, backend: AttentionBackend, states: StateCache | None = None
    ) -> None:
        self._model, self._backend, self._states = model, backend, states
        self.logits: list[torch.Tensor] = []

    @torch.inference_mode()
    def step(self, chunks: Sequence[ScheduledChunk], sequences: Sequence[SequenceState]) -> None:
        batch = pack(chunks, sequences, block_size=BLOCK_SIZE, device=CPU, padding=self._model.rows)
        attention = self._backend.begin_step(batch)
        states: StepStates | None = None
        if self._states is not None:
            states = self._states.begin_step(batch, [chunk.state for chunk in chunks])
        hidden = self._model.forward(batch.input_ids, batch.positions, attention, states=states)
        self.logits.append(self._model.compute_logits(hidden[: len(batch.slot_mapping)]))


def runners(spec: DecoderSpec, num_blocks: int, kernels: NativeKernels) -> list[Runner]:
    """Native, Python in bfloat16, Python in float32."""
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE}
    native = native_model(spec, kernels)
    backend = NativeAttentionBackend(native, native.cache, **sizes)
    backend.blocks[0].fill_(torch.nan)  # what was not written must not be read
    found = [Runner(native, backend)]
    for dtype in (torch.bfloat16, torch.float32):
        plain = random_decoder(spec, dtype)
        found.append(Runner(plain, TorchAttentionBackend(plain.cache, **sizes, device=CPU)))
    return found


def computed(
    spec: DecoderSpec, prompts: list[list[int]], kernels: NativeKernels, seed: int
) -> list[Runner]:
    """Return runners with their logits.

    Each prompt is a list of chunk lengths, computed one a step, all prompts side by side.
    """
    order = torch.randperm(
        sum(-(-sum(prompt) // BLOCK_SIZE) for prompt in prompts),
        generator=torch.Generator().manual_seed(seed),
    ).tolist()
    num_blocks = len(order)
    tables, sequences = [], []
    for i, prompt in enumerate(prompts):
        needed = -(-sum(prompt) // BLOCK_SIZE)
        tables.append(tuple(order[:needed]))
        del order[:needed]
        tokens = token_array((7 * i + 3 * j * j + j) % VOCAB_SIZE for j in range(sum(prompt)))
        message = AddRequest(
            request_id=str(i), prompt_token_ids=tokens, params=SamplingParams(max_tokens=1)
        )
        sequences.append(SequenceState(message))
    found = runners(spec, num_blocks, kernels)
    for step in range(max(map(len, prompts))):
        running = [i for i, prompt in enumerate(prompts) if step < len(prompt)]
        chunks = [
            ScheduledChunk(
                str(i), sum(prompts[i][:step]), prompts[i][step], tables[i], 1, "prefill"
            )
            for i in running
        ]
        for runner in found:
            runner.step(chunks, [sequences[i] for i in running])
    return found


def check(spec: DecoderSpec, prompts: list[list[int]], kernels: NativeKernels, seed: int) -> None:
    """Native logits are as exact as PyTorch's; arguments as of `computed`.

    Of all rows together: PyTorch's roundings of a single one may cancel out by luck.
    """
    native, rounded, exact = (
        torch.cat(runner.logits) for runner in computed(spec, prompts, kernels, seed)
    )
    error, allowed = (native - exact).abs(), (rounded - exact).abs()
    assert float(error.max()) <= 1.5 * float(allowed.max()) + 0.01 * float(exact.abs().max())
    assert float(error.mean()) <= 1.2 * float(allowed.mean()) + 0.002 * float(exact.abs().max())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@given(
    prompts=st.lists(
        st.lists(st.integers(1, 3) | st.integers(1, 150), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    ),
    num_threads=st.integers(1, 3),
    instructions=st.sampled_from(TESTED or ["none"]),
    seed=st.integers(0, 1000),
)
@examples(25)
def test_as_exact_as_the_python_layers(
    spec: DecoderSpec, prompts: list[list[int]], num_threads: int, instructions: str, seed: int
) -> None:
    check(spec, prompts, NativeKernels(num_threads, instructions), seed)


@pytest.mark.parametrize(
    "spec", [SPECS[name] for name in ("grouped", "one key head", "windows", "sinks")]
)
@pytest.mark.parametrize("instructions", TESTED)
def test_long_contexts_are_shared_among_threads(spec: DecoderSpec, instructions: str) -> None:
    """Few tasks of many keys are split, and their parts merged."""
    long = [700, 600, 700, 1, 3, 40, 300]
    check(spec, [long, [1] * len(long)], NativeKernels(2, instructions), seed=0)


RANKS = {
    "every head its own keys": decoder_spec(num_kv_heads=4, intermediate_size=128),
    "biases": decoder_spec(qkv_bias=True, output_bias=True, mlp_bias=True, intermediate_size=128),
    "normed heads, untied": decoder_spec(
        qk_norm="head", tie_word_embeddings=False, intermediate_size=128
    ),
    "norms around": decoder_spec(
        order="sandwich", residual_scale=0.5, activation="gelu_tanh", intermediate_size=128
    ),
    "embeddings for each layer": embedded_spec(order="sandwich", intermediate_size=128),
    "experts and sinks": decoder_spec(
        has_sinks=True,
        residual_scale=0.5,
        intermediate_size=128,
        experts={"shared_size": 64, "has_shared_gate": True, "has_bias": True},
    ),
}


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("name", RANKS)
def test_ranks_together_are_as_exact_as_one(name: str, instructions: str) -> None:
    spec = RANKS[name]

    def logits(communicator: Communicator) -> list[torch.Tensor]:
        kernels = NativeKernels(2, instructions)
        native = native_model(spec, kernels, communicator)
        backend = NativeAttentionBackend(native, native.cache, num_blocks=3, block_size=BLOCK_SIZE)
        backend.blocks[0].fill_(torch.nan)
        runner = Runner(native, backend)
        for start, count in ((0, 70), (70, 1)):
            chunk = ScheduledChunk("0", start, count, (2, 0, 1), 1, "prefill")
            runner.step([chunk], [sequence])
        return runner.logits

    tokens = token_array((3 * j * j + j) % VOCAB_SIZE for j in range(71))
    message = AddRequest(
        request_id="0", prompt_token_ids=tokens, params=SamplingParams(max_tokens=1)
    )
    sequence = SequenceState(message)
    whole, parts = logits(ALONE), on_all_ranks(2, logits)[0]
    for expected, found in zip(whole, parts, strict=True):
        assert found.shape == expected.shape
        error = (found - expected).abs().mean()
        assert float(error) <= 0.002 * float(expected.abs().max())


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("chunks", [[600], [1, 599], [256, 256, 88], [37] * 16 + [8]])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_chunks_do_not_change_a_bit(
    chunks: list[int], instructions: str, is_quantized: bool
) -> None:
    """A row is summed in one order beside any other rows; keys are not split so far."""
    prompt = token_array((3 * j * j + j) % VOCAB_SIZE for j in range(600))
    logits = []
    for lengths in ([599, 1], chunks):
        native = native_model(SPECS["grouped"], NativeKernels(2, instructions))
        cache = replace(native.cache, is_quantized=is_quantized)
        backend = NativeAttentionBackend(native, cache, num_blocks=19, block_size=BLOCK_SIZE)
        runner = Runner(native, backend)
        message = AddRequest(
            request_id="0", prompt_token_ids=prompt, params=SamplingParams(max_tokens=1)
        )
        sequence, start = SequenceState(message), 0
        for length in lengths:
            runner.step(
                [ScheduledChunk("0", start, length, tuple(range(19)), 1, "prefill")], [sequence]
            )
            start += length
        logits.append(runner.logits[-1][-1])
    assert torch.equal(*logits)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_weights_are_counted_as_the_python_layers_count_them(spec: DecoderSpec) -> None:
    """An embedding that is no output projection is not read in a step."""
    plain = random_decoder(spec, torch.bfloat16)
    plain.load_weights(dict(plain.checkpoint_slots()).items())
    native = native_model(spec, NativeKernels(1, native_instructions()[0]))
    num_unread = 0 if spec.tie_word_embeddings else plain.embed_tokens.weight.nbytes
    if plain.layer_inputs is not None:
        num_unread += plain.layer_inputs.embed_tokens.weight.nbytes
    num_bytes = sum(weight.nbytes for weight in plain.parameters())
    assert native.num_weight_bytes == plain.num_weight_bytes == num_bytes - num_unread


def test_what_cannot_run_natively_is_named() -> None:
    spec = SPECS["grouped"]
    assert "float32" in why_not_native(spec, torch.float32, CPU)
    assert "cuda" in why_not_native(spec, torch.bfloat16, torch.device("cuda"))
    assert "24" in why_not_native(decoder_spec(head_dim=24), torch.bfloat16, CPU)
    assert "544" in why_not_native(decoder_spec(head_dim=544), torch.bfloat16, CPU)
