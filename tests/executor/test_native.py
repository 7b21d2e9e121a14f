"""Native layers against the Python ones in float32: random architectures, tables and chunks."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.core.plan import ScheduledChunk
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.base import AttentionBackend
from legato.executor.attention.native_backend import NativeAttentionBackend
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.batch import pack
from legato.executor.sequence import SequenceState
from legato.model.decoder import Decoder
from legato.model.native import Machine, make_native, native_instructions, why_not_native
from legato.model.rope import RopeFrequencies
from legato.model.spec import DecoderSpec
from tests.profiles import examples

CPU = torch.device("cpu")
BLOCK_SIZE = 32
VOCAB_SIZE = 100


def decoder_spec(**changes: object) -> DecoderSpec:
    head_dim = changes.get("head_dim", 32)
    assert isinstance(head_dim, int)
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "max_model_len": 8192,
        "rope": RopeFrequencies(tuple(0.5**i for i in range(head_dim // 2)), 1.0),
        "sliding_windows": (None, None),
        "tie_word_embeddings": True,
        **changes,
    }
    return DecoderSpec(**settings)  # type: ignore[arg-type]


SPECS = {
    "grouped": decoder_spec(),
    "wide heads": decoder_spec(head_dim=128, num_heads=6),
    "every head its own keys": decoder_spec(num_kv_heads=4),
    "one key head": decoder_spec(num_heads=9, num_kv_heads=1, head_dim=64),
    "windows": decoder_spec(sliding_windows=(45, None)),
    "biases": decoder_spec(qkv_bias=True, output_bias=True, mlp_bias=True),
    "normed heads, untied": decoder_spec(qk_norm=True, tie_word_embeddings=False),
}

pytestmark = pytest.mark.skipif(
    bool(why_not_native(SPECS["grouped"], torch.bfloat16, CPU)),
    reason=why_not_native(SPECS["grouped"], torch.bfloat16, CPU),
)


def random_decoder(spec: DecoderSpec, dtype: torch.dtype) -> Decoder:
    """The same weights for every dtype: those that bfloat16 can hold."""
    torch.manual_seed(0)
    decoder = Decoder(spec, dtype=dtype, device=CPU)
    for name, weight in decoder.named_parameters():
        values = torch.randn(weight.shape) * (0.3 if weight.dim() == 1 else 0.15)
        weight.copy_((values + float("norm" in name)).bfloat16())
    return decoder


class Runner:
    """Runs the same plans on one decoder; `logits` are of all rows, step by step."""

    def __init__(self, decoder: Decoder, backend: AttentionBackend) -> None:
        self._decoder, self._backend = decoder, backend
        self.logits: list[torch.Tensor] = []

    @torch.inference_mode()
    def step(self, chunks: Sequence[ScheduledChunk], sequences: Sequence[SequenceState]) -> None:
        batch = pack(chunks, sequences, block_size=BLOCK_SIZE, device=CPU)
        hidden = self._decoder(batch.input_ids, batch.positions, self._backend.begin_step(batch))
        self.logits.append(self._decoder.compute_logits(hidden[: len(batch.slot_mapping)]))


def runners(spec: DecoderSpec, num_blocks: int, machine: Machine) -> list[Runner]:
    """Native, Python in bfloat16, Python in float32."""
    native = random_decoder(spec, torch.bfloat16)
    make_native(native, machine)
    backend = NativeAttentionBackend(native, machine, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    backend._cache.fill_(torch.nan)  # what was not written must not be read
    found = [Runner(native, backend)]
    for dtype in (torch.bfloat16, torch.float32):
        plain = random_decoder(spec, dtype)
        sizes = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE}
        found.append(Runner(plain, TorchAttentionBackend.for_decoder(plain, **sizes)))
    return found


def check(spec: DecoderSpec, prompts: list[list[int]], machine: Machine, seed: int) -> None:
    """Each prompt is a list of chunk lengths, computed one a step, all prompts side by side."""
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
    native, rounded, exact = found = runners(spec, num_blocks, machine)
    for step in range(max(map(len, prompts))):
        running = [i for i, prompt in enumerate(prompts) if step < len(prompt)]
        chunks = [
            ScheduledChunk(str(i), sum(prompts[i][:step]), prompts[i][step], tables[i], 1)
            for i in running
        ]
        for runner in found:
            runner.step(chunks, [sequences[i] for i in running])
    for ours, theirs, truth in zip(native.logits, rounded.logits, exact.logits, strict=True):
        error, allowed = (ours - truth).abs(), (theirs - truth).abs()
        assert float(error.max()) <= 1.5 * float(allowed.max()) + 0.01 * float(truth.abs().max())
        assert float(error.mean()) <= 1.2 * float(allowed.mean()) + 0.002 * float(truth.abs().max())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@given(
    prompts=st.lists(
        st.lists(st.integers(1, 3) | st.integers(1, 150), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    ),
    num_threads=st.integers(1, 3),
    instructions=st.sampled_from(native_instructions() or ["none"]),
    seed=st.integers(0, 1000),
)
@examples(25)
def test_as_exact_as_the_python_layers(
    spec: DecoderSpec, prompts: list[list[int]], num_threads: int, instructions: str, seed: int
) -> None:
    check(spec, prompts, Machine(num_threads, instructions), seed)


@pytest.mark.parametrize("spec", [SPECS["grouped"], SPECS["one key head"], SPECS["windows"]])
@pytest.mark.parametrize("instructions", native_instructions())
@pytest.mark.parametrize("last", [1, 3, 40, 300])
def test_long_contexts_are_shared_among_threads(
    spec: DecoderSpec, last: int, instructions: str
) -> None:
    """Few tasks of many keys are split, and their parts merged."""
    check(spec, [[700, 600, 700, last], [1, 1, 1, 1]], Machine(2, instructions), seed=0)


@pytest.mark.parametrize("instructions", native_instructions())
@pytest.mark.parametrize("chunks", [[600], [1, 599], [256, 256, 88], [37] * 16 + [8]])
def test_chunks_do_not_change_a_bit(chunks: list[int], instructions: str) -> None:
    """A row is summed in one order, whatever is computed beside it; keys are not split so far."""
    prompt = token_array((3 * j * j + j) % VOCAB_SIZE for j in range(600))
    logits = []
    for lengths in ([599, 1], chunks):
        machine = Machine(2, instructions)
        native = random_decoder(SPECS["grouped"], torch.bfloat16)
        make_native(native, machine)
        sizes = {"num_blocks": 19, "block_size": BLOCK_SIZE}
        runner = Runner(native, NativeAttentionBackend(native, machine, **sizes))
        message = AddRequest(
            request_id="0", prompt_token_ids=prompt, params=SamplingParams(max_tokens=1)
        )
        sequence, start = SequenceState(message), 0
        for length in lengths:
            runner.step([ScheduledChunk("0", start, length, tuple(range(19)), 1)], [sequence])
            start += length
        logits.append(runner.logits[-1][-1])
    assert torch.equal(*logits)


def test_what_cannot_run_natively_is_named() -> None:
    spec = SPECS["grouped"]
    assert "float32" in why_not_native(spec, torch.float32, CPU)
    assert "cuda" in why_not_native(spec, torch.bfloat16, torch.device("cuda"))
    assert "24" in why_not_native(decoder_spec(head_dim=24), torch.bfloat16, CPU)
    assert "288" in why_not_native(decoder_spec(head_dim=288), torch.bfloat16, CPU)
