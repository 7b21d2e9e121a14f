"""Plans made by hand, and what came of them booked as a scheduler would."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from legato.core.outputs import TokenLogprobs
from legato.core.plan import BlockMove, Deadline, ScheduledChunk, StepPlan, StepResult
from legato.core.pooling import PromptPooling
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import ChunkKind
from legato.core.token_ids import token_array
from legato.core.vocabulary import Vocabulary
from legato.executor.executor import Executor
from legato.executor.host_cache import HostCache
from legato.executor.torch_executor import TorchExecutor
from legato.grammar.matcher import Grammar, compile_grammar
from legato.grammar.tokens import grammar_tokenizer
from legato.language.forms.source import grammar_source
from legato.model.model import LayerWatch, Model, StepAttention
from legato.model.states import StepStates
from tests.executor.backends import BLOCK_SIZE, Backend
from tests.model.random_models import VOCAB_SIZE, decoder_spec

SPEC = decoder_spec(
    sliding_windows=(45, None), qkv_bias=True, qk_norm="head", tie_word_embeddings=False
)
NUM_BLOCKS = 24
EOS = 2
VOCABULARY = Vocabulary.of(
    [bytes([ord("!") + i]) if i != EOS else b"<eos>" for i in range(VOCAB_SIZE - 10)],
    frozenset({EOS}),
)
"""One character a token. The model's last ten rows are padding."""
_TOKENIZER = grammar_tokenizer(VOCABULARY)


@dataclass
class Stream:
    """One request: what is known of it, and where its blocks are.

    Attributes:
        tokens: the prompt, and the output so far.
        num_computed: of these, have keys and values in the cache.
        block_ids: on the device.
        slots: in host memory, while it is swapped out.
        is_complete: whether its grammar lets nothing follow.
        pooled: its vector, once its prompt is pooled.
        error: why it ended, if it did so for a fault.
        num_dropped: rows of its chunks that were dropped.
    """

    message: AddRequest
    tokens: list[int]
    num_computed: int = 0
    block_ids: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_complete: bool = False
    pooled: bytes | None = None
    error: str = ""
    num_dropped: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.message.prompt_token_ids)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_left(self) -> int:
        """Tokens that it may still get."""
        if self.is_complete or self.error or self.message.pooling is not None:
            return 0
        assert self.message.params.max_tokens is not None
        return self.message.params.max_tokens - len(self.output)


class ByHand:
    """Drives an executor over a pool of blocks, which it hands out in an order of its own."""

    def __init__(self, executor: Executor, block_ids: Sequence[int]) -> None:
        self.executor = executor
        self.streams: dict[str, Stream] = {}
        self._free = list(block_ids)
        self._num_slots = 0
        self._new: list[AddRequest] = []
        self._ended: list[str] = []
        self._step_id = 0
        self.results: list[StepResult] = []

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        pooling: PromptPooling | None = None,
        **params: Any,
    ) -> Stream:
        settings = {"temperature": 0.0, "max_tokens": 8, "seed": 0, **params}
        message = AddRequest(
            request_id=request_id,
            prompt_token_ids=token_array(prompt),
            params=SamplingParams(**settings),
            eos_token_ids=(EOS,),
            pooling=pooling,
        )
        self._new.append(message)
        self.streams[request_id] = stream = Stream(message, list(prompt))
        return stream

    def end(self, request_id: str) -> None:
        self._free += self.streams.pop(request_id).block_ids
        self._ended.append(request_id)

    def step(
        self,
        drafts: Mapping[str, Sequence[int]] | None = None,
        deadline: Deadline | None = None,
        /,
        **num_tokens: int,
    ) -> None:
        """Compute so many of each stream's known tokens, and verify its drafts behind them."""
        chunks = [
            self._chunk(request_id, count, tuple((drafts or {}).get(request_id, ())))
            for request_id, count in num_tokens.items()
        ]
        plan = StepPlan(
            step_id=self._step_id,
            chunks=tuple(chunks),
            new_requests=tuple(m for m in self._new if m.request_id in num_tokens),
            ended_requests=tuple(self._ended),
            deadline=deadline,
        )
        self._step_id += 1
        self.executor.submit(plan)
        self._new = [m for m in self._new if m.request_id not in num_tokens]
        self._ended = []
        results = self.executor.collect()
        self.results.append(results)
        for request_id, fault in results.faults.items():
            self.streams[request_id].error = fault.error
        for request_id, result in results.chunks.items():
            stream = self.streams[request_id]
            stream.num_computed += result.num_tokens
            stream.tokens += result.token_ids
            stream.logprobs += result.logprobs or ()
            stream.prompt_logprobs += result.prompt_logprobs or ()
            stream.is_complete = result.is_complete
            stream.pooled = stream.pooled or result.pooled
            stream.num_dropped += result.num_dropped

    def finish(self) -> None:
        """Steps with all that is left of every request, until no request may get more."""
        while running := {name: s for name, s in self.streams.items() if s.num_left}:
            self.step(**{name: len(s.tokens) - s.num_computed for name, s in running.items()})

    def preempt(self, request_id: str) -> None:
        """Its blocks go to the next who wants any; it is computed again from its first token."""
        stream = self.streams[request_id]
        self._free = [*self._free, *stream.block_ids]
        stream.block_ids, stream.num_computed = (), 0

    def swap_out(self, request_id: str) -> None:
        stream = self.streams[request_id]
        stream.slots = tuple(range(self._num_slots, self._num_slots + len(stream.block_ids)))
        self._num_slots += len(stream.slots)
        self._move(stream, to_host=True)
        self._free = [*self._free, *stream.block_ids]
        stream.block_ids = ()

    def swap_in(self, request_id: str) -> None:
        """Resume a request, perhaps in other blocks than before."""
        stream = self.streams[request_id]
        self._grow(stream, len(stream.slots))
        self._move(stream, to_host=False)
        stream.slots = ()

    def grammar(self, request_id: str) -> Grammar:
        form = self.streams[request_id].message.params.structured_outputs
        assert form is not None
        return compile_grammar(_TOKENIZER, grammar_source(form, ["<eos>"]))

    def _move(self, stream: Stream, *, to_host: bool) -> None:
        self.executor.move(
            [
                BlockMove(block_id, slot, to_host)
                for block_id, slot in zip(stream.block_ids, stream.slots, strict=True)
            ]
        )

    def _chunk(self, request_id: str, count: int, drafts: tuple[int, ...]) -> ScheduledChunk:
        stream = self.streams[request_id]
        start, end = stream.num_computed, stream.num_computed + count
        self._grow(stream, -(-(end + len(drafts)) // BLOCK_SIZE))
        is_last = end == len(stream.tokens)
        kind: ChunkKind = "prefill"
        if drafts:
            assert is_last
            kind = "verify"
        elif start >= stream.num_prompt_tokens and count == 1:
            kind = "decode"
        return ScheduledChunk(
            request_id,
            start,
            count + len(drafts),
            stream.block_ids,
            len(drafts) + 1 if is_last and stream.message.pooling is None else 0,
            kind,
            draft_token_ids=drafts,
        )

    def _grow(self, stream: Stream, num_blocks: int) -> None:
        while len(stream.block_ids) < num_blocks:
            stream.block_ids = (*stream.block_ids, self._free.pop())


class FailingModel:
    """A `Model` that raises on demand, when keys and values have been written."""

    def __init__(self, model: Model) -> None:
        self.fails = False
        self.cache, self.dtype, self.device = model.cache, model.dtype, model.device
        self.num_weight_bytes, self.load_weights = model.num_weight_bytes, model.load_weights
        self.num_torch_threads, self.drops_rows = model.num_torch_threads, model.drops_rows
        self.rows = model.rows
        self._model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        *,
        states: StepStates | None = None,
        num_layers: int | None = None,
        watch: LayerWatch | None = None,
    ) -> torch.Tensor:
        hidden = self._model.forward(
            input_ids, positions, attention, states=states, num_layers=num_layers, watch=watch
        )
        if self.fails:
            raise RuntimeError("boom")
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden)


def run_by_hand(backend: Backend, seed: int = 0) -> tuple[ByHand, FailingModel]:
    model, attention = backend.make(SPEC, NUM_BLOCKS)
    failing = FailingModel(model)
    executor = TorchExecutor(
        failing,
        attention,
        BLOCK_SIZE,
        host_cache=HostCache(attention.blocks, (NUM_BLOCKS,)),
        grammar=lambda request_id: hand.grammar(request_id),
    )
    generator = torch.Generator().manual_seed(seed)
    hand = ByHand(executor, torch.randperm(NUM_BLOCKS, generator=generator).tolist())
    return hand, failing


def text_of(stream: Stream) -> str:
    """Of its output."""
    return b"".join(map(VOCABULARY.token_bytes, stream.output)).decode()


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * salt + 3 * i * i + i) % VOCAB_SIZE for i in range(length)]
