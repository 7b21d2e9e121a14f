"""POST /trace/start and /trace/stop: a trace of a running server."""

import tempfile
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse, Response
from starlette.background import BackgroundTask

from legato.api.bodies.body_model import RequestModel
from legato.api.http.access import ADMINS_ONLY
from legato.api.http.bodies import JsonRoute, json_response
from legato.api.http.errors import trace_conflict
from legato.api.openapi import responses
from legato.engine.client.engine import Engine
from legato.observe.traces.tracer import TraceFormat, Tracer

router = APIRouter(route_class=JsonRoute, tags=["trace"])

_NAMES: dict[TraceFormat, str] = {"jsonl": "trace.jsonl", "perfetto": "trace.json"}
_MEDIA_TYPES: dict[TraceFormat, str] = {
    "jsonl": "application/x-ndjson",
    "perfetto": "application/json",
}


class TraceRequest(RequestModel):
    """The trace to record."""

    format: TraceFormat = "jsonl"
    """JSON lines, or the Perfetto UI's format."""


class TraceStarted(msgspec.Struct, frozen=True):
    format: str


class LiveTrace:
    """Records at most one trace at a time, in a file that clients neither name nor see."""

    def __init__(self, engine: Engine, max_bytes: int) -> None:
        self._engine = engine
        self._max_bytes = max_bytes
        self._running: tuple[Tracer, TraceFormat, tempfile.TemporaryDirectory[str]] | None = None

    def start(self, trace_format: TraceFormat) -> None:
        """Raises `ApiError` if a trace is running."""
        if self._running is not None:
            raise trace_conflict("a trace is being recorded already; POST /trace/stop ends it")
        directory = tempfile.TemporaryDirectory(prefix="legato-trace-")
        tracer = Tracer(
            self._engine.activity.records,
            Path(directory.name) / _NAMES[trace_format],
            self._engine.info.settings,
            self._max_bytes,
            self._engine.settings.replay_basis,
        )
        self._running = tracer, trace_format, directory

    async def stop(self) -> Response:
        """Return the trace; raises `ApiError` if none is running."""
        if self._running is None:
            raise trace_conflict("no trace is being recorded; POST /trace/start begins one")
        (tracer, trace_format, directory), self._running = self._running, None
        await tracer.stop()
        return FileResponse(
            tracer.path,
            media_type=_MEDIA_TYPES[trace_format],
            filename=_NAMES[trace_format],
            headers={"X-Trace-Error": tracer.error} if tracer.error else None,
            background=BackgroundTask(directory.cleanup),
        )


def _live_trace(request: Request) -> LiveTrace:
    live_trace: LiveTrace = request.app.state.live_trace
    return live_trace


LiveTraceDep = Annotated[LiveTrace, Depends(_live_trace)]


@router.post(
    "/trace/start",
    responses=responses(TraceStarted, errors=(HTTPStatus.CONFLICT,)),
    dependencies=[ADMINS_ONLY],
)
async def start_trace(body: TraceRequest, live_trace: LiveTraceDep) -> Response:
    """Start recording steps and requests. For admins only."""
    live_trace.start(body.format)
    return json_response(TraceStarted(body.format))


@router.post(
    "/trace/stop",
    response_class=FileResponse,
    responses=responses(errors=(HTTPStatus.CONFLICT,), files=tuple(_MEDIA_TYPES.values())),
    dependencies=[ADMINS_ONLY],
)
async def stop_trace(live_trace: LiveTraceDep) -> Response:
    """End the trace, and return it. For admins only."""
    return await live_trace.stop()
