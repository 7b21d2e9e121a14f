import math

import pytest

from legato.core.errors import ConfigError
from legato.core.slo import SloClass


@pytest.mark.parametrize("field", ["itl_s", "tpot_s", "ttft_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_promise_must_be_a_positive_number(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        SloClass(**{field: value})


@pytest.mark.parametrize(
    ("slo", "is_best_effort", "step_s"),
    [
        (SloClass(), True, None),
        (SloClass(ttft_s=1.0), False, None),
        (SloClass(itl_s=0.1), False, 0.1),
        (SloClass(tpot_s=0.2), False, 0.2),
        (SloClass(itl_s=0.1, tpot_s=0.2), False, 0.1),
        (SloClass(itl_s=0.2, tpot_s=0.1), False, 0.1),
    ],
)
def test_what_a_class_promises(slo: SloClass, is_best_effort: bool, step_s: float | None) -> None:
    assert slo.is_best_effort is is_best_effort
    assert slo.promise_s == step_s


def test_a_class_says_its_promises() -> None:
    assert str(SloClass(itl_s=0.05, ttft_s=2.0)) == "ITL 0.05 s, TTFT 2 s"
    assert str(SloClass()) == "best-effort"
