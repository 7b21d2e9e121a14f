"""Charges tenants for a step: its predicted time, divided by the cost of their parts."""

from collections import defaultdict
from collections.abc import Sequence

from legato.core.plan import ScheduledChunk
from legato.scheduler.order import LATE, LATE_SHARE
from legato.scheduler.queues import Queues
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import UNKNOWN_TOKEN_S, StepTimeModel
from legato.scheduler.tenants import Tenant

_MOST_OWED_S = 1.0
"""Most prefill that late prompts are owed, or are ahead by: they may have come just now."""
_NOTHING = StepShape()
_KEYS = 1000
"""Keys by which the cost of one key is measured."""


def book_step(
    chunks: Sequence[ScheduledChunk], queues: Queues, model: StepTimeModel, step_s: float | None
) -> None:
    """Charge the tenants for a step, and record what their late prompts are owed.

    Args:
        step_s: the step's predicted time; None if unknown.
    """
    _share_with_late(chunks, queues, model)
    if step_s is None:
        step_s = UNKNOWN_TOKEN_S * sum(chunk.num_tokens for chunk in chunks)
    tenants = queues.tenants
    if len(tenants) == 1:
        shares = {queues.tenant_of_running(chunks[0].request_id): 1.0}
    else:
        shares = _shares(chunks, queues, model)
    for tenant, share in shares.items():
        tenant.charge(step_s * share)
    least = queues.least()
    waiting_or_served = shares if least is None else (least,)
    tenants.raise_floor(max(tenant.counter_s for tenant in waiting_or_served))


def _shares(
    chunks: Sequence[ScheduledChunk], queues: Queues, model: StepTimeModel
) -> dict[Tenant, float]:
    """Return each tenant's fraction of a step; fixed costs are divided like the rest."""
    costs: defaultdict[Tenant, float] = defaultdict(float)
    shapes: defaultdict[Tenant, StepShape] = defaultdict(StepShape)
    row, key = _decode_costs(chunks, model)
    for chunk in chunks:
        tenant = queues.tenant_of_running(chunk.request_id)
        if chunk.kind == "decode":
            costs[tenant] += row + key * chunk.start
        else:
            shapes[tenant].add(chunk)
    fixed_s = model.seconds(_NOTHING) if model.is_known else 0.0
    for tenant, shape in shapes.items():
        costs[tenant] += model.seconds(shape) - fixed_s if model.is_known else shape.num_tokens
    whole = sum(costs.values())
    if not whole > 0.0:
        return dict.fromkeys(costs, 1.0 / len(costs))
    return {tenant: cost / whole for tenant, cost in costs.items()}


def _decode_costs(chunks: Sequence[ScheduledChunk], model: StepTimeModel) -> tuple[float, float]:
    """Return the cost of a decode row with its own key, and of each key before that.

    Costs are in tokens while step times are unknown. A row costs the step's average, since its rows
    are computed together.
    """
    num_rows = sum(chunk.kind == "decode" for chunk in chunks)
    if not num_rows or not model.is_known:
        return 1.0, 0.0
    rows = StepShape()
    rows.num_decode_rows = rows.num_samples = num_rows
    without_keys_s = model.seconds(rows)
    rows.decode_context = _KEYS
    key_s = (model.seconds(rows) - without_keys_s) / _KEYS
    return (without_keys_s - model.seconds(_NOTHING)) / num_rows + key_s, key_s


def _share_with_late(
    chunks: Sequence[ScheduledChunk], queues: Queues, model: StepTimeModel
) -> None:
    """Record what the late prompts of each tenant are owed of its prefill."""
    for chunk in chunks:
        if chunk.kind == "prefill":
            tenant = queues.tenant_of_running(chunk.request_id)
            seconds = model.prefill_s(chunk.start, chunk.num_tokens)
            # A request without a deadline among such with one has the group of late ones, too.
            is_late = queues.rank(queues.running[chunk.request_id])[0] == LATE
            owed_s = tenant.late_owed_s + seconds * (LATE_SHARE - is_late)
            tenant.late_owed_s = min(max(owed_s, -_MOST_OWED_S), _MOST_OWED_S)
