"""Compiles the grammars of requests in a thread, while the engine's loop goes on."""

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

from llguidance import LLTokenizer

from legato.core.outputs import FinishReason, RefusalReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.vocabulary import Vocabulary
from legato.core.worker import Worker
from legato.grammar.matcher import STACK_BYTES, Grammar, GrammarError, compile_grammar
from legato.grammar.tokens import grammar_tokenizer

_LOW_BY = 10
"""Niceness of the compiling thread: the threads of a step go first."""
_CACHED = 64
"""Compiled grammars that are kept for later requests."""
_RETRY_S = 1.0
"""When a refused request should try again."""


class _Made(NamedTuple):
    grammar: Grammar
    compile_s: float


class _Waiting(NamedTuple):
    request: AddRequest
    made: Future[_Made]


class Grammars:
    """Holds requests back until their grammars are compiled.

    Args:
        max_waiting: most requests that wait here; further ones are refused.

    Attributes:
        unfinished: ids of the requests with a grammar that have not ended.
    """

    def __init__(self, max_waiting: int = 2**31) -> None:
        self.unfinished: set[str] = set()
        self._max_waiting = max_waiting
        self._vocabulary: Vocabulary | None = None
        self._worker = Worker("grammars", stack_bytes=STACK_BYTES, low_by=_LOW_BY)
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()  # key its source
        self._waiting: dict[str, _Waiting] = {}  # key: request id
        self._ready: dict[str, Grammar] = {}  # key: id of a request that has not ended
        self._tokenizer: Future[LLTokenizer] | None = None
        self._compile_s: dict[str, float] = {}  # key as in `_ready`

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Set the vocabulary of outputs, before the first request with a grammar."""
        self._vocabulary = vocabulary

    def __getitem__(self, request_id: str) -> Grammar:
        """Return the grammar of a request that was passed on; no other request shares it."""
        return self._ready[request_id]

    @property
    def is_compiling(self) -> bool:
        """Whether requests wait for their grammars."""
        return bool(self._waiting)

    @property
    def has_ready(self) -> bool:
        """Whether a waiting request's grammar is compiled."""
        return any(waiting.made.done() for waiting in self._waiting.values())

    def prepare(self) -> None:
        """Start to make the tokenizer of grammars; for 0.1 s nothing else runs."""
        if self._tokenizer is None:
            assert self._vocabulary is not None, "told before any request has a grammar"
            self._tokenizer = self._worker.submit(grammar_tokenizer, self._vocabulary)

    def take_compile_s(self) -> Mapping[str, float]:
        """Return how long the grammars of requests passed on since the last call took to compile.

        Key: request id.
        """
        taken, self._compile_s = self._compile_s, {}
        return taken

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is compiled, but no longer than so many seconds."""
        wait([waiting.made for waiting in self._waiting.values()], seconds, "FIRST_COMPLETED")

    def hold_back(self, events: Iterable[Event]) -> tuple[list[Event], list[RequestOutput]]:
        """Return the events for the scheduler, and the ends of requests that ended here."""
        passed: list[Event] = []
        outputs: list[RequestOutput] = []
        for event in events:
            if isinstance(event, AddRequest) and event.params.structured_outputs is not None:
                source = event.params.structured_outputs.grammar
                assert source is not None, "the form is resolved before it comes here"
                outputs += self._begin(event, source)
            elif isinstance(event, AbortRequest) and event.request_id in self._waiting:
                self._waiting.pop(event.request_id).made.cancel()
                outputs.append(_aborted(event))
            else:
                passed.append(event)
        for waiting in [waiting for waiting in self._waiting.values() if waiting.made.done()]:
            del self._waiting[waiting.request.request_id]
            try:
                made = waiting.made.result()
            except (GrammarError, MemoryError) as error:
                outputs.append(_failed(waiting.request, error))
            else:
                self._ready[waiting.request.request_id] = made.grammar
                self._compile_s[waiting.request.request_id] = made.compile_s
                passed.append(waiting.request)
        return passed, outputs

    def forget(self, outputs: Iterable[RequestOutput]) -> None:
        """Forget the grammars of requests that have ended."""
        for output in outputs:
            if output.finish_reason is not None:
                self._ready.pop(output.request_id, None)
                self.unfinished.discard(output.request_id)

    def _begin(self, request: AddRequest, source: str) -> Sequence[RequestOutput]:
        if len(self._waiting) >= self._max_waiting and not request.is_rerun:
            told = f"{len(self._waiting)} requests wait for their grammars already"
            return [_refused(request, told)]
        self.prepare()
        made = self._worker.submit(self._compile, source)
        self._waiting[request.request_id] = _Waiting(request, made)
        self.unfinished.add(request.request_id)
        return []

    def _compile(self, source: str) -> _Made:
        """Return a grammar for one request; only this thread uses the cache."""
        assert self._tokenizer is not None
        tokenizer = self._tokenizer.result()
        started_s = time.perf_counter()
        if source not in self._compiled:
            self._compiled[source] = compile_grammar(tokenizer, source)
        self._compiled.move_to_end(source)
        if len(self._compiled) > _CACHED:
            self._compiled.popitem(last=False)
        copied = self._compiled[source].copied()
        return _Made(copied, time.perf_counter() - started_s)


def _failed(request: AddRequest, error: Exception) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        error=f"the grammar of the output does not compile: {error}",
        is_asked_for=not isinstance(error, MemoryError),
    )


def _aborted(request: AbortRequest) -> RequestOutput:
    return RequestOutput(request_id=request.request_id, finish_reason=FinishReason.ABORT)


def _refused(request: AddRequest, error: str) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.REFUSED,
        error=error,
        refusal=RefusalReason.QUEUE_FULL,
        retry_after_s=_RETRY_S,
    )
