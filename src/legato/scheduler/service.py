"""What each tenant has of a step: its predicted time, shared out by what each one's part costs."""

from collections import defaultdict
from collections.abc import Sequence

from legato.core.plan import ScheduledChunk
from legato.scheduler.queues import Queues
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from legato.scheduler.tenants import Tenant

_UNKNOWN_TOKEN_S = 1e-3
"""Of a token, as long as nothing is known of steps."""
_NOTHING = StepShape()


def book_step(
    chunks: Sequence[ScheduledChunk], queues: Queues, model: StepTimeModel, step_s: float | None
) -> None:
    """Charge the tenants for a step, and note whose late prompts had their turn.

    Args:
        step_s: its predicted time; None where nothing is known.
    """
    _note_turns(chunks, queues)
    if step_s is None:
        step_s = _UNKNOWN_TOKEN_S * sum(chunk.num_tokens for chunk in chunks)
    tenants = queues.tenants
    if len(tenants) == 1:
        shares = {queues.tenant(queues.running[chunks[0].request_id]): 1.0}
    else:
        shares = _shares(chunks, queues, model)
    for tenant, share in shares.items():
        tenant.charge(step_s * share)
    least = queues.least()
    waiting_or_served = shares if least is None else (least,)
    tenants.reach(max(tenant.counter_s for tenant in waiting_or_served))


def _shares(
    chunks: Sequence[ScheduledChunk], queues: Queues, model: StepTimeModel
) -> dict[Tenant, float]:
    """Fractions of a step; what it costs whatever it holds is shared as the rest of it is."""
    shapes: defaultdict[Tenant, StepShape] = defaultdict(StepShape)
    for chunk in chunks:
        shapes[queues.tenant(queues.running[chunk.request_id])].add(chunk)
    if model.is_known:
        fixed_s = model.seconds(_NOTHING)
        costs = {tenant: model.seconds(shape) - fixed_s for tenant, shape in shapes.items()}
    else:
        costs = {tenant: float(shape.num_tokens) for tenant, shape in shapes.items()}
    whole = sum(costs.values())
    if not whole > 0.0:
        return dict.fromkeys(costs, 1.0 / len(costs))
    return {tenant: cost / whole for tenant, cost in costs.items()}


def _note_turns(chunks: Sequence[ScheduledChunk], queues: Queues) -> None:
    has_late: dict[Tenant, bool] = {}
    for chunk in chunks:
        if chunk.kind == "prefill":
            request = queues.running[chunk.request_id]
            tenant = queues.tenant(request)
            has_late[tenant] = request.is_late or has_late.get(tenant, False)
    for tenant, is_late in has_late.items():
        tenant.num_timely_steps = 0 if is_late else tenant.num_timely_steps + 1
