"""How long steps really last in a test: random costs, noise, and a calibration that saw them."""

import itertools
import random
from collections.abc import Callable

from hypothesis import strategies as st

from legato.core.plan import StepPlan
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.margin import Tails
from legato.scheduler.step_costs import ROW_BOUNDS, StepCosts
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel


def _seconds(largest: float) -> st.SearchStrategy[float]:
    return st.just(0.0) | st.floats(largest / 1000.0, largest)


def true_costs() -> st.SearchStrategy[StepCosts]:
    """Of a machine on which steps of some ten tokens take from a millisecond to a second."""
    return st.builds(
        StepCosts,
        step_s=st.floats(0.001, 0.05),
        row_s=st.tuples(*[_seconds(0.002)] * (len(ROW_BOUNDS) + 1)),
        decode_row_s=_seconds(0.002),
        decode_context_s=_seconds(0.0001),
        chunk_s=_seconds(0.005),
        area_s=_seconds(0.0001),
        context_s=_seconds(0.0001),
        sample_s=_seconds(0.001),
    )


def step_shape(
    *, num_decodes: int = 0, context: int = 1, chunk: int = 0, start: int = 0, samples: bool = False
) -> StepShape:
    """Some decodes with `context` keys each, and a prefill chunk if `chunk` is not 0."""
    shape = StepShape()
    for _ in range(num_decodes):
        shape.add_decode(context)
    if chunk:
        shape.add_prefill(start, chunk, samples=samples)
    return shape


def calibrate(costs: StepCosts, max_len: int) -> list[MeasuredStep]:
    """Steps of many shapes, each measured without error."""
    chunks = [0, 1, 5, 16, 40, 64, 150, 256, 700, 1024, 2000]
    shapes = [
        step_shape(num_decodes=n, context=context, chunk=chunk, start=start, samples=chunk % 2 == 0)
        for n, chunk in itertools.product([0, 1, 3, 8, 40], chunks)
        if n or chunk
        for context, start in ((1, 0), (max_len // 3, max_len), (max_len, max_len // 2))
    ]
    for shape in shapes[::7]:
        shape.add_prefill(0, 9, samples=True)
    return [(shape, costs.seconds(shape)) for shape in shapes]


def steady_model(costs: StepCosts, max_len: int) -> StepTimeModel:
    """Calibrated, on a machine where nothing interrupted steps for long."""
    return StepTimeModel(calibrate(costs, max_len), costs.rows, Tails(watched_s=300.0))


def truth(costs: StepCosts, noise: Callable[[], float]) -> Callable[[StepPlan], float]:
    """Seconds of a step; `noise` is a factor on each."""
    return lambda plan: costs.seconds(StepShape.of(plan)) * noise()


def noise_of(seed: int) -> Callable[[], float]:
    """Mostly a few per cent; one step in thirty is interrupted."""
    rng = random.Random(seed)

    def factor() -> float:
        return rng.uniform(2.0, 6.0) if rng.random() < 1 / 30 else rng.gauss(1.0, 0.05)

    return factor
