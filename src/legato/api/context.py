"""The objects that every handler needs."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from fastapi import Depends, Request

from legato.api.arrival import Arrival
from legato.api.http.errors import unknown_model
from legato.api.http.middleware import Lifecycle
from legato.api.http.outlet import Turns
from legato.api.readers.reader_pool import TextProcesses
from legato.engine.client.engine import Engine
from legato.observe.metrics.server_metrics import ServerMetrics

_TRACE_CONTEXT = ("traceparent", "tracestate")


class KVEventSource(msgspec.Struct, frozen=True, kw_only=True):
    """The address of cache events for routers, in vLLM's format.

    Attributes:
        endpoint, replay_endpoint, topic: as of `CachePublisher`.
    """

    endpoint: str
    replay_endpoint: str | None
    topic: str
    publisher: str = "zmq"
    encoding: str = "msgpack"
    schema_version: int = 1
    enable_kv_cache_events: bool = True


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The engine, its text processes and the server's shared state.

    Attributes:
        max_unread_tokens: of a completion that may wait for a client that reads too slowly; one
            more ends its stream.
        shows_timings: as `llama_timings` of `ServerConfig`.
        kv_event_source: None if the server publishes no cache events.
        turns: shared by all answers in progress.
        prompt_numbers: numbers for the ids of prompts at the engine; each is used once.
    """

    engine: Engine
    text: TextProcesses
    metrics: ServerMetrics
    lifecycle: Lifecycle
    max_unread_tokens: int
    kv_event_source: KVEventSource | None = None
    shows_timings: bool = False
    turns: Turns = field(default_factory=Turns)
    prompt_numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def model_name(self) -> str:
        return self.engine.info.served_model_name

    def check_model(self, asked: str | None) -> None:
        """Raises `ApiError` if `asked` is another model; a request may leave it out."""
        if asked is not None and not self.engine.info.is_called(asked):
            raise unknown_model(asked, self.engine.info.served_model_names)


async def _context(request: Request) -> ApiContext:
    context: ApiContext = request.app.state.context
    return context


async def _arrival(request: Request) -> Arrival:
    headers = request.headers
    context = {name: headers[name] for name in _TRACE_CONTEXT if name in headers}
    state = request.state
    return Arrival(
        request_id=state.request_id,
        answer_id=state.answer_id,
        received_s=state.received_s,
        trace_context=context,
        tenant=getattr(state, "tenant", None),
        cache_owner=getattr(state, "cache_owner", None),
        warnings=state.warnings,
    )


ContextDep = Annotated[ApiContext, Depends(_context)]
ArrivalDep = Annotated[Arrival, Depends(_arrival)]
