"""A step under construction: the shared parts that every policy is made of."""

from typing import Protocol

from legato.core.plan import ScheduledChunk
from legato.core.request import Request
from legato.scheduler.budget import StepBudget, StepShape
from legato.scheduler.queues import Queues


class KVManager(Protocol):
    """What the scheduler asks of the KV cache."""

    def reserve(self, request_id: str, num_tokens: int, *, spare_blocks: int = 0) -> bool: ...

    def block_ids(self, request_id: str) -> tuple[int, ...]: ...

    def release(self, request_id: str) -> None: ...


class StepBuilder:
    """Collects the chunks of one step, taking blocks and preempting as it goes."""

    def __init__(
        self,
        queues: Queues,
        kv: KVManager,
        budget: StepBudget,
        *,
        max_num_seqs: int,
        enable_chunked_prefill: bool,
    ) -> None:
        self._queues = queues
        self._kv = kv
        self._budget = budget
        self._max_num_seqs = max_num_seqs
        self._enable_chunked_prefill = enable_chunked_prefill
        self._shape = StepShape()
        self.chunks: list[ScheduledChunk] = []
        self.preempted: list[Request] = []

    @property
    def is_over_budget(self) -> bool:
        return self._budget.is_exceeded(self._shape)

    def add_decodes(self) -> None:
        """Move every running stream forward by one token, whatever the budget."""
        for request in self._queues.decoding():
            if self._make_room(request):
                self._shape.num_decode_rows += 1
                self._add_chunk(request, 1)

    def add_prefills(self) -> None:
        """Spend what is left of the budget on prompts: those begun first, then waiting ones."""
        for request in self._queues.prefilling():
            num_tokens = self._chunk_size(request)
            if not num_tokens:
                return
            self._add_prefill(request, num_tokens)
        self._admit()

    def _admit(self) -> None:
        while len(self._queues.running) < self._max_num_seqs:
            request = self._queues.next_waiting()
            if request is None:
                return
            num_tokens = self._chunk_size(request)
            # The whole prompt's blocks at once: a prompt half computed never has to be preempted
            # for its own next chunk, and its blocks lie side by side. The spare ones let each
            # running stream begin its next block.
            if not num_tokens or not self._kv.reserve(
                request.request_id, request.num_tokens, spare_blocks=len(self._queues.running)
            ):
                return
            self._queues.admit(request)
            self._add_prefill(request, num_tokens)

    def _chunk_size(self, request: Request) -> int:
        room = self._budget.max_chunk(self._shape, request.num_computed_tokens)
        if not self._enable_chunked_prefill and request.num_remaining_tokens > room:
            return 0
        return min(request.num_remaining_tokens, room)

    def _make_room(self, request: Request) -> bool:
        """Reserve the block of a decode's token, preempting the latest admitted until it fits."""
        while not self._kv.reserve(request.request_id, request.num_tokens):
            victim = self._queues.last_running()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._kv.release(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._queues.preempt(request)
        self.preempted.append(request)

    def _add_prefill(self, request: Request, num_tokens: int) -> None:
        self._shape.num_prefill_tokens += num_tokens
        self._add_chunk(request, num_tokens)

    def _add_chunk(self, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        self.chunks.append(
            ScheduledChunk(
                request_id=request.request_id,
                start=start,
                num_tokens=num_tokens,
                block_ids=self._kv.block_ids(request.request_id),
                num_samples=int(start + num_tokens == request.num_tokens),
            )
        )
