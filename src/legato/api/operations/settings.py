"""GET and PATCH /settings: the scheduler's settings and promises, while requests run."""

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field

from legato.api.bodies.body_model import RequestModel
from legato.api.context import ContextDep
from legato.api.http.access import ADMINS_ONLY
from legato.api.http.bodies import JsonRoute, json_response
from legato.api.openapi import responses
from legato.core import ranges
from legato.core.config import NumDrafts, Policy, PrefillOrder, Quantile, SchedulerConfig
from legato.core.errors import ConfigError, InvalidRequestError
from legato.engine.client.engine import Engine

router = APIRouter(route_class=JsonRoute, tags=["settings"])


def _within(type_: Any) -> Any:
    """Return a pydantic field with the range of a setting's type."""
    (meta,) = type_.__metadata__
    return Field(ge=meta.ge, le=meta.le)


Count = Annotated[int, _within(ranges.Count)]
Seconds = Annotated[float, _within(ranges.Seconds)]
Speculative = Annotated[int, _within(NumDrafts)] | Literal["auto", "off"]
NoPromise = Literal["auto", "off"]
QuantileOfGaps = Annotated[float, _within(Quantile)]


class SettingsPatch(BaseModel):
    """Fields of `SchedulerConfig`; a JSON merge patch (RFC 7396): null restores the default."""

    model_config = RequestModel.model_config

    policy: Policy | None = None
    """Order of requests in a step."""
    max_num_batched_tokens: Count | None = None
    """Token budget of a step."""
    enable_chunked_prefill: bool | None = None
    """Compute long prompts in chunks."""
    prefill_order: PrefillOrder | None = None
    """Order of prompts."""
    max_wait_s: Seconds | None = None
    """Longest wait of a tenant without running requests, in seconds."""
    itl_slo_s: Seconds | NoPromise | None = None
    """Longest time between two tokens, in seconds; `auto` and `off` as of `--itl-slo`. null is
    `off` on a server started with it, else `auto`."""
    itl_slo_quantile: QuantileOfGaps | None = None
    """Share of a request's tokens that `itl_slo_s` covers."""
    tpot_slo_s: Seconds | None = None
    """Longest mean time per output token, in seconds."""
    ttft_slo_s: Seconds | None = None
    """Longest time to the first token, in seconds."""
    speculative: Speculative | None = None
    """Tokens drafted ahead of a stream; `auto` chooses."""

    def apply(self, config: SchedulerConfig, started: SchedulerConfig) -> SchedulerConfig:
        """Return changed settings; raises `ConfigError` if they contradict each other.

        Args:
            started: the settings that the server was started with.
        """
        defaults = SchedulerConfig()
        changes: dict[str, Any] = {name: getattr(self, name) for name in self.model_fields_set}
        if "itl_slo_s" in changes:
            asked = self.itl_slo_s or ("off" if _without_promise(started) == "off" else "auto")
            changes["bounds_gaps"] = asked == "auto"
            if isinstance(asked, str):
                changes["itl_slo_s"] = None
                changes.setdefault("itl_slo_quantile", None)  # meaningless without its SLO
        return msgspec.structs.replace(
            config,
            **{
                name: getattr(defaults, name) if value is None else value
                for name, value in changes.items()
            },
        )


def _without_promise(config: SchedulerConfig) -> NoPromise | None:
    """Return how gaps are bounded without an ITL SLO; None with one."""
    if config.itl_slo_s is not None:
        return None
    return "auto" if config.bounds_gaps else "off"


class SettingValues(msgspec.Struct, frozen=True, kw_only=True):
    """Fields as in `SchedulerConfig`."""

    policy: Policy
    max_num_batched_tokens: int | None
    enable_chunked_prefill: bool
    prefill_order: PrefillOrder
    max_wait_s: float
    itl_slo_s: float | NoPromise | None
    itl_slo_quantile: float
    tpot_slo_s: float | None
    ttft_slo_s: float | None
    speculative: int | str

    @classmethod
    def of(cls, config: SchedulerConfig) -> "SettingValues":
        return cls(**{name: getattr(config, name) for name in cls.__struct_fields__})


class SettingsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in effect.

    Attributes:
        asked: as set, at the start or since; null is "auto". `itl_slo_s` is never null.
        resolved: the same, with every "auto" replaced. `itl_slo_s` is null without a promise.
        most_batched_tokens: the largest `max_num_batched_tokens` that may be set.
    """

    asked: SettingValues
    resolved: SettingValues
    most_batched_tokens: int


def describe(engine: Engine) -> SettingsAnswer:
    """Return the engine's current settings."""
    settings = engine.settings
    asked = SettingValues.of(settings.asked)
    itl_slo_s = asked.itl_slo_s or _without_promise(settings.asked)
    return SettingsAnswer(
        asked=msgspec.structs.replace(asked, itl_slo_s=itl_slo_s),
        resolved=SettingValues.of(settings.resolved),
        most_batched_tokens=settings.most_batched_tokens,
    )


@router.get("/settings", responses=responses(SettingsAnswer))
async def get_settings(context: ContextDep) -> Response:
    """Return the scheduler's settings."""
    return json_response(describe(context.engine))


@router.patch("/settings", responses=responses(SettingsAnswer), dependencies=[ADMINS_ONLY])
async def change_settings(body: SettingsPatch, context: ContextDep) -> Response:
    """Change them while requests run. For admins only."""
    try:
        settings = context.engine.settings
        context.engine.reconfigure(body.apply(settings.asked, settings.started))
    except ConfigError as error:
        raise InvalidRequestError(str(error)) from error
    return json_response(describe(context.engine))
