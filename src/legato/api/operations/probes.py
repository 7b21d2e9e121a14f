"""Endpoints for supervisors and monitoring: probes, /load, /version and /metrics."""

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from legato.api.context import ContextDep
from legato.api.http.bodies import json_response
from legato.api.http.errors import shutting_down
from legato.api.http.outlet import PacedResponse
from legato.api.openapi import responses
from legato.core.stats import KeptPromise
from legato.core.version import __version__


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """Attributes:
    status: "ok", or "degraded" for a `reason`.
    promises: on the gaps between tokens, and what was delivered; key the class.
    margin: share of a step's predicted time that is added to keep the promises.
    wrong_kernels: native kernels that compute wrong numbers on this machine, and are not used; key
        the set of instructions.
    cut_sizes: sizes that are larger than can be used; key the flag, value the part that is taken.
    """

    status: str
    reason: str = ""
    promises: dict[str, KeptPromise] = {}
    margin: float | None = None
    wrong_kernels: dict[str, str] = {}
    cut_sizes: dict[str, str] = {}


router = APIRouter(tags=["probes"])


class Live(msgspec.Struct, frozen=True):
    """Attributes: `status`: "ok": the server answers."""

    status: str = "ok"


class Startup(msgspec.Struct, frozen=True, omit_defaults=True):
    """Attributes:
    status: "loading" or "started".
    elapsed_s: how long the server has been loading; absent once it has started.
    parts_s: seconds of the parts of the start that have ended; key the part's name.
    """

    status: str
    elapsed_s: float | None = None
    parts_s: dict[str, float] = {}


class LoadAnswer(msgspec.Struct, frozen=True):
    """Attributes: `server_load`: requests in flight, whole ones and streams."""

    server_load: int


@router.get("/livez", responses=responses(Live))
async def live() -> Response:
    """Return 200 while the server answers: also while it loads, drains or restarts its engine.

    A failure of this probe is the only one that a restart from outside mends.
    """
    return json_response(Live())


@router.get("/startupz", responses=responses(Startup))
async def startup(context: ContextDep) -> Response:
    """Return 200 once the model is loaded, and 503 with the progress before that."""
    return json_response(Startup("started", parts_s=context.engine.info.start_s))


@router.get("/readyz", responses=responses(Health))
@router.get("/health", responses=responses(Health))
@router.head("/health", include_in_schema=False)
@router.get("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
async def health(context: ContextDep) -> Response:
    """Return 200 while new requests are accepted, else 503.

    The body says "degraded" and the reason if the latest step was bound to break an SLO, or a
    process does not answer and is about to be replaced. If there are promises on gaps between
    tokens, the body has what was delivered in the last minute. It names kernels that compute wrong
    numbers on this machine, and are therefore not used, and sizes that were cut to this machine's.
    """
    if context.lifecycle.is_draining:
        raise shutting_down()
    engine = context.engine
    engine.check_running()
    reason = engine.problem or context.text.problem or engine.stats.broken_promise
    promises = engine.kept()
    margin = engine.stats.step_time_margin if promises else None
    status = "degraded" if reason else "ok"
    wrong_kernels, cut_sizes = engine.info.rejected_kernels, engine.info.cut_sizes
    return json_response(Health(status, reason, promises, margin, wrong_kernels, cut_sizes))


@router.get("/load", responses=responses(LoadAnswer))
async def load(context: ContextDep) -> Response:
    """Return how many requests are in flight."""
    return json_response(LoadAnswer(context.lifecycle.num_in_flight - 1))


@router.get("/version", responses=responses())
async def version() -> dict[str, str]:
    """Return the version of Legato."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse, responses=responses())
async def metrics(request: Request, context: ContextDep) -> Response:
    """Return metrics for Prometheus."""
    # Paced: hundreds of lines at once, or a thread that takes turns with this one, delay streams.
    text, media_type = context.metrics.render(request.headers.get("Accept", ""))
    return PacedResponse(text, context.turns, media_type)
