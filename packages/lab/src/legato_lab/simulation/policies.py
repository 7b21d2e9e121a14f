"""Policies to compare, in the user's notation: KIND[:TOKENS][:ORDER].

- `slo`: a step takes as long as the ITL and TPOT SLOs allow, or, under `--itl-slo auto`, as long as
  streams do not notice.
- `fixed`: a step holds a fixed number of tokens; running streams go first.
- `prefill-first`: the same, but running streams wait for every chunk.
- `whole`: prompts are not cut, and running streams go first; TOKENS are at least the context.
- `whole-first`: prompts are not cut, and running streams wait for each: early vLLM.
"""

from typing import Any, get_args

import msgspec

from legato.core.config import PrefillOrder, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.slo import P99, SloClass

_POLICIES: dict[str, dict[str, Any]] = {
    "slo": {"policy": "stall-free"},
    "fixed": {"policy": "stall-free"},
    "prefill-first": {"policy": "prefill-first"},
    "whole": {"policy": "stall-free", "enable_chunked_prefill": False},
    "whole-first": {"policy": "prefill-first", "enable_chunked_prefill": False},
}
"""Key the kind, value fields of `SchedulerConfig`."""


def parse_policy(text: str, common: SchedulerConfig) -> SchedulerConfig:
    """Return a server's settings with this policy.

    Args:
        common: settings and promises that all compared servers share. TOKENS and ORDER override
            them.

    Raises:
        ConfigError: there is no such policy, or it contradicts the promises.
    """
    kind, *options = text.split(":")
    if kind not in _POLICIES:
        raise ConfigError(f"no policy {text!r}; policies are: {', '.join(_POLICIES)}")
    if kind == "slo" and not (common.promises_pace or common.bounds_gaps):
        raise ConfigError("policy slo keeps an ITL or TPOT SLO, but none is set")
    given = {**_POLICIES[kind], **dict(map(_option, options))}
    return msgspec.structs.replace(common if kind == "slo" else _unpaced(common), **given)


def _option(text: str) -> tuple[str, int | str]:
    """Return a field of `SchedulerConfig` and its value."""
    if text.isdecimal():
        return "max_num_batched_tokens", int(text)
    if text in get_args(PrefillOrder):
        return "prefill_order", text
    orders = ", ".join(get_args(PrefillOrder))
    raise ConfigError(f"{text!r} is neither a number of tokens nor one of {orders}")


def _unpaced(config: SchedulerConfig) -> SchedulerConfig:
    """Remove the bounds of a step, promised or not; promises of the first token stay."""
    return msgspec.structs.replace(
        config,
        itl_slo_s=None,
        itl_slo_quantile=P99,
        bounds_gaps=False,
        tpot_slo_s=None,
        slo_classes={name: SloClass(ttft_s=slo.ttft_s) for name, slo in config.slo_classes.items()},
    )
