"""Compiles the grammars of requests in a thread, while the engine's loop goes on."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from functools import partial
from typing import NamedTuple, TypeVar

from llguidance import LLTokenizer

from legato.core.containment import Containment
from legato.core.outputs import FinishReason, RefusalReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.vocabulary import Vocabulary
from legato.core.worker import Worker
from legato.grammar.matcher import STACK_BYTES, Grammar, GrammarError, compile_grammar
from legato.grammar.tokens import grammar_tokenizer

_Value = TypeVar("_Value")

_LOW_BY = 10
"""Niceness of the compiling thread: the threads of a step go first."""
_CACHED = 64
"""Compiled grammars that are kept for later requests."""
_RETRY_S = 1.0
"""When a refused request should try again."""
_LONGEST_S = 60.0
"""Time after which a grammar is given up that is still being compiled. Compilations that keep their
limits take a hundredth of that; the others' threads go on, since none can be stopped."""
_TOO_LONG = "it takes too long, or so do the grammars of other requests"
_MOST_STUCK = 4
"""Most threads that go on with grammars that were given up; then no grammar is compiled."""


class _Made(NamedTuple):
    grammar: Grammar
    compile_s: float


class _Work(NamedTuple):
    """What a thread compiles since `begun_s`; without a source, the tokenizer."""

    source: str
    begun_s: float


class _Waiting(NamedTuple):
    request: AddRequest
    source: str
    made: Future[_Made]


class Grammars:
    """Holds requests back until their grammars are compiled.

    Args:
        max_waiting: most requests that wait here; further ones are refused.
        clock: returns seconds.

    Attributes:
        containment: records what compilations raise that is not about the grammar.
        unfinished: ids of the requests with a grammar that have not ended.
    """

    def __init__(
        self, max_waiting: int = 2**31, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.containment = Containment()
        self.unfinished: set[str] = set()
        self._max_waiting = max_waiting
        self._clock = clock
        self._vocabulary: Vocabulary | None = None
        self._worker = _worker()
        self._lock = threading.Lock()
        """Guards `_work`, `_stuck` and `_compiled`: threads with work that was given up go on."""
        self._work: _Work | None = None  # of the worker, now
        self._stuck: dict[str, _Work] = {}  # key its source, of work that was given up and goes on
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()  # key its source
        self._waiting: dict[str, _Waiting] = {}  # key: request id
        self._ready: dict[str, Grammar] = {}  # key: id of a request that has not ended
        self._tokenizer: Future[LLTokenizer] | None = None  # to be made
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
    def waiting(self) -> Set[str]:
        """Ids of the requests that wait for their grammars."""
        return self._waiting.keys()

    @property
    def has_ready(self) -> bool:
        """Whether a waiting request's grammar is compiled, or given up."""
        return self._is_stuck or any(one.made.done() for one in self._waiting.values())

    def prepare(self) -> None:
        """Start to make the tokenizer of grammars; for 0.1 s nothing else runs."""
        made = self._tokenizer
        if made is None or (made.done() and made.exception() is not None):
            assert self._vocabulary is not None, "told before any request has a grammar"
            make = partial(grammar_tokenizer, self._vocabulary)
            self._tokenizer = self._worker.submit(self._noted, "", make)

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
        return passed, outputs

    def take_ready(self) -> tuple[list[AddRequest], list[RequestOutput]]:
        """Return the requests that may begin, and the ends of requests that do not begin."""
        passed: list[AddRequest] = []
        outputs = self._give_up()
        for waiting in [waiting for waiting in self._waiting.values() if waiting.made.done()]:
            request, error = waiting.request, waiting.made.exception()
            del self._waiting[request.request_id]
            if error is not None:
                if not isinstance(error, GrammarError | MemoryError):
                    self.containment.note(f"the grammar of {request.request_id}", error)
                outputs.append(_failed(request, error))
                continue
            made = waiting.made.result()
            self._ready[request.request_id] = made.grammar
            self._compile_s[request.request_id] = made.compile_s
            passed.append(request)
        return passed, outputs

    def forget(self, outputs: Iterable[RequestOutput]) -> None:
        """Forget the grammars of requests that have ended."""
        for output in outputs:
            if output.finish_reason is not None:
                self._ready.pop(output.request_id, None)
                self.unfinished.discard(output.request_id)
                waiting = self._waiting.pop(output.request_id, None)
                if waiting is not None:
                    waiting.made.cancel()

    def _begin(self, request: AddRequest, source: str) -> Sequence[RequestOutput]:
        if len(self._waiting) >= self._max_waiting and not request.is_rerun:
            told = f"{len(self._waiting)} requests wait for their grammars already"
            return [_refused(request, told)]
        if source in self._stuck or len(self._stuck) > _MOST_STUCK:
            return [_failed(request, TimeoutError(_TOO_LONG))]
        self._submit(request, source)
        return []

    def _submit(self, request: AddRequest, source: str) -> None:
        self.prepare()
        assert self._tokenizer is not None
        made = self._worker.submit(
            self._noted, source, partial(self._compile, source, self._tokenizer)
        )
        self._waiting[request.request_id] = _Waiting(request, source, made)
        self.unfinished.add(request.request_id)

    def _noted(self, source: str, work: Callable[[], _Value]) -> _Value:
        """Do work in the worker's thread, and note since when."""
        noted = _Work(source, self._clock())
        with self._lock:
            self._work = noted
        try:
            return work()
        finally:
            with self._lock:
                if self._work is noted:
                    self._work = None
                if self._stuck.get(source) is noted:
                    del self._stuck[source]

    @property
    def _is_stuck(self) -> bool:
        work = self._work
        return work is not None and self._clock() - work.begun_s > _LONGEST_S

    def _give_up(self) -> list[RequestOutput]:
        """End the requests of a grammar that takes too long; another thread makes the others."""
        with self._lock:  # the work may end now, and the next one begin
            work = self._work
            if work is None or not self._is_stuck:
                return []
            self._work, self._stuck[work.source] = None, work
        self._worker = _worker()
        if self._tokenizer is not None and not self._tokenizer.done():
            self._tokenizer = None
        left, self._waiting = self._waiting, {}
        outputs: list[RequestOutput] = []
        for request, source, made in left.values():
            if made.done():
                self._waiting[request.request_id] = _Waiting(request, source, made)
                continue
            made.cancel()
            outputs += self._begin(request, source)
        return outputs

    def _compile(self, source: str, tokenizer: Future[LLTokenizer]) -> _Made:
        """Return a grammar for one request."""
        started_s = time.perf_counter()
        compiled = self._compiled.get(source) or compile_grammar(tokenizer.result(), source)
        with self._lock:
            self._compiled[source] = compiled
            self._compiled.move_to_end(source)
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        return _Made(compiled.copied(), time.perf_counter() - started_s)


def _worker() -> Worker:
    return Worker("grammars", stack_bytes=STACK_BYTES, low_by=_LOW_BY)


def _failed(request: AddRequest, error: BaseException) -> RequestOutput:
    is_its_own = isinstance(error, GrammarError)
    told = f"{error}" if is_its_own else f"{type(error).__name__}: {error}"
    return RequestOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        error=f"the grammar of the output does not compile: {told}",
        is_asked_for=is_its_own,
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
