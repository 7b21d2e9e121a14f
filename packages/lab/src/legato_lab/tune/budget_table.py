"""The rule of thumb of chunked prefill: the largest token budget whose step keeps the ITL SLO."""

from collections.abc import Sequence

import msgspec

from legato.scheduler.cost_fit import fit
from legato.scheduler.step_shape import StepShape
from legato_lab.simulation.machine import Machine
from legato_lab.tune.measure import BudgetTime, TypicalLoad

_TAIL = 0.99


class BudgetRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step of this many tokens, including the streams'.

    Attributes:
        measured_s: on the idle engine.
        fitted_s: by the step-time model that a scheduler begins with.
        served_s, served_p99_s: fitted to steps beside the server and its clients; the expectation
            and the 99th percentile.
        keeps_slo: whether the latter, with the time until the next step, is within the ITL SLO;
            None without one.
    """

    num_tokens: int
    measured_s: float
    fitted_s: float
    served_s: float
    served_p99_s: float
    keeps_slo: bool | None


def budget_rows(
    machine: Machine, load: TypicalLoad, budgets: Sequence[BudgetTime], itl_slo_s: float | None
) -> list[BudgetRow]:
    """Return a row for each measured budget."""
    belief = fit(machine.belief, machine.costs.rows)
    rows = []
    for budget in budgets:
        shape = _shape(load, budget.num_tokens)
        served_s = machine.costs.seconds(shape) + machine.delays.turnaround(load.num_streams)
        p99_s = served_s * machine.errors.quantile(shape, _TAIL)
        rows.append(
            BudgetRow(
                num_tokens=budget.num_tokens,
                measured_s=budget.measured_s,
                fitted_s=belief.seconds(shape),
                served_s=served_s,
                served_p99_s=p99_s,
                keeps_slo=None if itl_slo_s is None else p99_s <= itl_slo_s,
            )
        )
    return rows


def largest_budget(rows: Sequence[BudgetRow]) -> int | None:
    """Return the largest budget that keeps the SLO; None if none does."""
    return max((row.num_tokens for row in rows if row.keeps_slo), default=None)


def _shape(load: TypicalLoad, num_tokens: int) -> StepShape:
    shape = StepShape()
    for _ in range(load.num_streams):
        shape.add_decode(load.context)
    shape.add_prefill(load.start, num_tokens - load.num_streams, samples=False)
    return shape
