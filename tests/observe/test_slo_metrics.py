"""When a promise counts as kept."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from legato.core.outputs import FinishReason
from legato.core.slo import SloClass
from legato.observe.metrics.registry import MetricRegistry
from legato.observe.metrics.slo_metrics import RequestSlo, SloMetrics

CLASSES = {"gold": SloClass(itl_s=0.1, tpot_s=0.05, ttft_s=1.0), "batch": SloClass()}
_LABELS = ("slo_class", "slo", "verdict")


class Counts:
    """Attributes: `metrics`: what counts."""

    def __init__(self) -> None:
        self._registry = MetricRegistry("m")
        self.metrics = SloMetrics(self._registry, CLASSES, dict)

    def request(self, slo_class: str = "gold") -> RequestSlo:
        return RequestSlo(self.metrics, slo_class)

    def of(self, name: str) -> dict[str, float]:
        """What was counted; key the values of `_LABELS`."""
        families = text_string_to_metric_families(b"".join(self._registry.render()[0]).decode())
        samples = [s for family in families for s in family.samples if s.name == f"legato:{name}"]
        return {
            " ".join(s.labels[label] for label in _LABELS if label in s.labels): s.value
            for s in samples
            if s.value
        }


@pytest.mark.parametrize(("num_late", "verdict"), [(0, "attained"), (1, "attained"), (2, "missed")])
def test_a_request_may_have_one_late_token_in_a_hundred(num_late: int, verdict: str) -> None:
    counts = Counts()
    request = counts.request()
    request.first_token(0.5)
    for index in range(100):
        request.token(0.2 if index < num_late else 0.1)
    request.end(FinishReason.LENGTH)
    late = {"gold itl late": num_late} if num_late else {}
    in_time = {"gold ttft in_time": 1, "gold itl in_time": 100 - num_late}
    assert counts.of("slo_checks_total") == late | in_time
    assert counts.of("slo_requests_total") == {f"gold {verdict}": 1}


def test_every_promise_counts() -> None:
    counts = Counts()
    for ttft_s, tpot_s in ((2.0, 0.01), (0.5, 0.06)):
        request = counts.request()
        request.first_token(ttft_s)
        request.pace(tpot_s)
        request.end(FinishReason.STOP)
    assert counts.of("slo_requests_total") == {"gold missed": 2}


@pytest.mark.parametrize(("waited_s", "counted"), [(0.9, {}), (1.1, {"gold ttft late": 1})])
def test_a_client_that_leaves_in_vain_waited_too_long(
    waited_s: float, counted: dict[str, float]
) -> None:
    """A client that goes away before its deadline says nothing of the server."""
    counts = Counts()
    request = counts.request()
    request.no_first_token(waited_s)
    request.end(FinishReason.ABORT)
    assert counts.of("slo_checks_total") == counted
    assert counts.of("slo_requests_total") == {}


def test_what_was_waived_is_not_judged() -> None:
    counts = Counts()
    request = counts.request()
    request.waive()
    request.first_token(2.0)
    request.token(2.0)
    request.pace(2.0)
    request.end(FinishReason.LENGTH)
    assert counts.of("slo_checks_total") == {}
    assert counts.of("slo_requests_total") == {"gold waived": 1}


@pytest.mark.parametrize("reason", FinishReason)
def test_an_end_is_counted_once(reason: FinishReason) -> None:
    counts = Counts()
    counts.request().end(reason)
    verdicts = {"abort": {}, "error": {"gold missed": 1}, "refused": {"gold refused": 1}}
    assert counts.of("slo_requests_total") == verdicts.get(reason, {"gold attained": 1})


def test_best_effort_and_nonsense_promise_nothing() -> None:
    counts = Counts()
    for name in ("batch", "platinum"):
        counts.request(name).end(FinishReason.REFUSED)
    request = counts.request("batch")
    request.first_token(100.0)
    request.end(FinishReason.STOP)
    assert counts.of("slo_checks_total") == counts.of("slo_requests_total") == {}
    assert counts.of("slo_seconds") == {"gold ttft": 1.0, "gold itl": 0.1, "gold tpot": 0.05}
