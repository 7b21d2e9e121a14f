"""Says what would have changed the wait for a token."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.ranges import MOST_S
from legato.core.step_record import StepRecord
from legato.engine.replay.replay import Replay, Token, Without
from legato.engine.replay.window import MOST_REPLAYED, Window, extra_s

MOST_STEPS = 1000
"""Steps that all replays of one token may plan together: 1 to 2 s on one core."""
_MOST_REQUESTS = 5
_MOST_APART = 0.25
"""How far a wait in a replay of all may be from the recorded wait, as a share of that."""


class Counterfactual(NamedTuple):
    """A wait that would have been another without one thing.

    Attributes:
        without: in words.
        forecast_share: share of the replay's steps whose time is a forecast.
    """

    without: str
    change_s: float
    is_on_time: bool
    num_late: int
    forecast_share: float


class Explained(NamedTuple):
    """The counterfactuals of a token, the best first.

    Attributes:
        promise_s: of the token's gap; None without one.
        interrupted_s: how long the machine was away in the token's steps.
        num_agreeing, num_steps: steps that the replay of all plans as recorded, and all of these.
        num_replayed: steps that all replays planned together.
        num_open: things without a result, since the token came in none of their steps, or all steps
            were spent.
    """

    found: list[Counterfactual]
    promise_s: float | None
    interrupted_s: float
    num_agreeing: int
    num_steps: int
    num_replayed: int
    num_open: int


def counterfactuals(
    path: Path, token: Token, start_s: float, came_s: float, *, most_steps: int = MOST_STEPS
) -> Explained:
    """Return what would have changed the wait for a token, within `most_steps` replayed steps.

    Args:
        start_s, came_s: when the engine had the token before it, or the request; and the token.

    Raises:
        ValueError: why the trace cannot be replayed.
        ConfigError: as `read_trace`.
    """
    window = Window(path, came_s)
    own = [step for step in window.steps if step.ended_s > start_s]
    if not own:
        raise ValueError("its steps are not in the trace")
    blamed = _blamed(own, token.request_id)
    came = window.states_at(0)
    since_s = min([start_s, *(came[r].ready_s for r in blamed if r in came)])
    replay = Replay(window, window.first_step(since_s), token)
    num_left = most_steps
    base = replay.run(Without(), min(num_left, 2 * MOST_REPLAYED))
    num_left -= base.num_steps
    recorded = replay.recorded_plans
    agreeing = sum(a == b for a, b in zip(recorded, base.plans, strict=False))
    waited_s = came_s - max(start_s, replay.begins_s)
    if token.place == 0:
        waited_s = came_s - came[token.request_id].arrived.arrived_s
    if base.wait_s is not None and abs(base.wait_s - waited_s) > _MOST_APART * waited_s:
        raise ValueError(
            f"a replay of them waits {1e3 * base.wait_s:.0f} ms, and not {1e3 * waited_s:.0f} ms"
        )
    slo_class = came[token.request_id].arrived.slo_class
    config = window.basis.scheduler
    name = "ttft_s" if token.place == 0 else "itl_s"
    promise_s = getattr(config.classes[slo_class], name)
    interrupted_s = sum(map(extra_s, own))
    others = {r: came[r].arrived.tenant for r in blamed if r in came}
    wait_s = None if token.place == 0 else came_s - start_s
    ways = list(_ways(others, came[token.request_id].arrived.tenant, config, wait_s))
    if interrupted_s:
        ways.insert(
            0, ("without the interruptions of the machine", Without(has_interruptions=False))
        )
    found = []
    for words, way in ways:
        if num_left < len(recorded) or base.wait_s is None:
            break
        one = replay.run(way, min(num_left, 2 * len(recorded)))
        num_left -= one.num_steps
        if one.wait_s is not None:
            asked_s = getattr((way.config or config).classes[slo_class], name)
            is_on_time = asked_s is not None and one.wait_s <= asked_s
            share = 1.0 - one.num_recorded / max(1, one.num_steps)
            change_s = base.wait_s - one.wait_s
            found.append(Counterfactual(words, change_s, is_on_time, one.num_late, share))
    found.sort(key=lambda one: -one.change_s)
    num_replayed, num_open = most_steps - num_left, len(ways) - len(found)
    return Explained(
        found, promise_s, interrupted_s, agreeing, len(recorded), num_replayed, num_open
    )


def _blamed(steps: list[StepRecord], request_id: str) -> list[str]:
    """Return the others with the most prompt tokens in these steps."""
    tokens: Counter[str] = Counter()
    for step in steps:
        for chunk in step.chunks:
            if chunk.kind == "prefill" and chunk.request_id != request_id:
                tokens[chunk.request_id] += chunk.num_tokens
    return [other for other, _ in tokens.most_common(_MOST_REQUESTS)]


def _ways(
    others: dict[str, str], own_tenant: str, config: SchedulerConfig, gap_s: float | None
) -> Iterator[tuple[str, Without]]:
    """Yield what to take out.

    Args:
        others: key request id, value its tenant.
        gap_s: from one token to the next; None for a first token.
    """
    for request_id in others:
        yield f"without prompt {request_id}", Without(request_id=request_id)
    for tenant in dict.fromkeys(others.values()):
        if tenant != own_tenant:
            yield f"without tenant {tenant}", Without(tenant=tenant)
    if not config.enable_chunked_prefill or config.policy != "stall-free":
        return
    if config.itl_slo_s is not None:
        target_s = min(1.5 * config.itl_slo_s, MOST_S)
    elif gap_s is not None:
        target_s = gap_s / 2
    else:
        return
    milliseconds = max(1, round(100 * target_s) * 10)
    other = msgspec.structs.replace(config, itl_slo_s=milliseconds / 1e3, bounds_gaps=False)
    yield f"with --itl-slo {milliseconds}ms", Without(config=other)
