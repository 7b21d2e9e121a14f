from legato.scheduler.budget import UNLIMITED, TokenBudget
from legato.scheduler.step_shape import StepShape


def test_a_budget_that_decodes_exceed_leaves_nothing_and_never_less() -> None:
    budget, shape = TokenBudget(8), StepShape()
    assert budget.max_chunk(shape, 0, 100, UNLIMITED) == 8
    shape.num_decode_rows, shape.num_prefill_tokens = 3, 4
    assert budget.max_chunk(shape, 0, 100, UNLIMITED) == 1
    assert not budget.is_exceeded(shape, UNLIMITED)
    shape.num_decode_rows = 20
    assert budget.max_chunk(shape, 0, 100, UNLIMITED) == 0
    assert budget.is_exceeded(shape, UNLIMITED)
