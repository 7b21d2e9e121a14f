"""Declares each metric once, with everything that is shown about it.

A declaration has the metric's name, kind, labels and help text, and the section of
docs/reference/metrics.md that lists it: `python -m observability` writes the tables there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from legato.observe.metrics.prefix import MetricsPrefix

_OPENMETRICS = "application/openmetrics-text"
_OPENMETRICS_END = b"# EOF\n"
MODEL_LABEL = "model_name"

Kind = Literal["counter", "gauge", "histogram"]
Rows = Mapping[tuple[str, ...], float]
"""Key values of labels, value the metric's value."""
_Metric = TypeVar("_Metric", bound=MetricWrapperBase)


class Declaration(NamedTuple):
    """A metric's entry in the reference.

    Attributes:
        name: with the prefix, but without the "_total" that Prometheus appends to a counter's.
        labels: without the model's name, which all metrics have.
        text: Markdown.
        is_own: whether vLLM lacks this metric.
    """

    section: str
    kind: Kind
    name: str
    labels: tuple[str, ...]
    text: str
    is_own: bool


def count_of(counter: Counter) -> int:
    """Return a counter's current value."""
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return int(next(sample.value for sample in samples if sample.name.endswith("_total")))


class Labelled(Generic[_Metric]):
    """A metric with further labels; `of` takes their values in order."""

    def __init__(self, metric: _Metric, model_name: str) -> None:
        self._metric = metric
        self._model_name = model_name

    def of(self, *values: str) -> _Metric:
        return self._metric.labels(self._model_name, *values)

    def clear(self) -> None:
        """Forget all label values."""
        self._metric.clear()


class MetricRegistry:
    """All metrics; the first label of each is the model's name.

    Attributes:
        prefix: of metrics that vLLM has too.
        declared: all metrics, in the order of their declarations.
        collectors: rendered by Prometheus' client.
    """

    def __init__(self, model_name: str, prefix: MetricsPrefix = "legato") -> None:
        self.model_name = model_name
        self.prefix = prefix
        self.declared: list[Declaration] = []
        self.collectors = CollectorRegistry()

    def section(self, title: str) -> "Section":
        """Return a section of the reference, to declare its metrics."""
        return Section(self, title)

    def render(self, accepted: str = "") -> tuple[Iterator[bytes], str]:
        """Return all metrics, each rendered when it is asked for, and the media type.

        Args:
            accepted: an `Accept` header, by which the format is OpenMetrics or Prometheus' text.
        """
        if _OPENMETRICS not in accepted:
            each = (generate_latest(_One(metric)) for metric in self.collectors.collect())
            return each, CONTENT_TYPE_LATEST
        return self._in_openmetrics(), f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"

    def _in_openmetrics(self) -> Iterator[bytes]:
        for metric in self.collectors.collect():
            # Any other escaping replaces the colons in the metrics' names.
            text: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
                _One(metric), escaping=openmetrics.ALLOWUTF8
            )
            yield text.removesuffix(_OPENMETRICS_END)
        yield _OPENMETRICS_END


class _One(NamedTuple):
    """What Prometheus' client takes for a registry, with one metric."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return [self.metric]


class Section:
    """Declares metrics, either `own` ones or ones with vLLM's name and meaning."""

    def __init__(self, registry: MetricRegistry, title: str) -> None:
        self._registry = registry
        self._title = title

    def counter(self, name: str, text: str, *labels: str, own: bool = False) -> Labelled[Counter]:
        told = self._declare("counter", name, text, labels, own)
        return self._labelled(Counter(*told, registry=self._registry.collectors))

    def gauge(self, name: str, text: str, *labels: str, own: bool = False) -> Labelled[Gauge]:
        told = self._declare("gauge", name, text, labels, own)
        return self._labelled(Gauge(*told, registry=self._registry.collectors))

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], *labels: str, own: bool = False
    ) -> Labelled[Histogram]:
        """Args: buckets: inclusive upper bounds."""
        told = self._declare("histogram", name, text, labels, own)
        return self._labelled(Histogram(*told, buckets=buckets, registry=self._registry.collectors))

    def read_counter(
        self, name: str, text: str, read: Callable[[], float], *, own: bool = False
    ) -> None:
        """Args: read: returns the value; called once a scrape."""
        self.read_counters(name, text, read=lambda: {(): read()}, own=own)

    def read_gauge(
        self,
        name: str,
        text: str,
        read: Callable[[], float],
        *,
        own: bool = False,
        for_routers: bool = False,
    ) -> None:
        """Args: read, for_routers: as for `read_counter` and `read_gauges`."""
        self.read_gauges(name, text, read=lambda: {(): read()}, own=own, for_routers=for_routers)

    def read_counters(
        self, name: str, text: str, *labels: str, read: Callable[[], Rows], own: bool = False
    ) -> None:
        """Args: read: returns values by label values; called once a scrape."""
        self._read_all(CounterMetricFamily, self._declare("counter", name, text, labels, own), read)

    def read_gauges(
        self,
        name: str,
        text: str,
        *labels: str,
        read: Callable[[], Rows],
        own: bool = False,
        for_routers: bool = False,
    ) -> None:
        """Args:
        read: as for `read_counters`.
        for_routers: show it under vLLM's name too, with any prefix: routers know no other name.
        """
        told = self._declare("gauge", name, text, labels, own)
        self._read_all(GaugeMetricFamily, told, read)
        if for_routers and self._registry.prefix != "vllm":
            self._read_all(GaugeMetricFamily, (f"vllm:{name}", *told[1:]), read)

    def _declare(
        self, kind: Kind, name: str, text: str, labels: tuple[str, ...], own: bool
    ) -> tuple[str, str, tuple[str, ...]]:
        """Record a declaration; return the arguments for Prometheus' client."""
        full_name = f"{'legato' if own else self._registry.prefix}:{name}"
        self._registry.declared.append(
            Declaration(self._title, kind, full_name, labels, text, is_own=own)
        )
        return full_name, text, (MODEL_LABEL, *labels)

    def _labelled(self, metric: _Metric) -> Labelled[_Metric]:
        return Labelled(metric, self._registry.model_name)

    def _read_all(
        self,
        family: type[CounterMetricFamily | GaugeMetricFamily],
        told: tuple[str, str, tuple[str, ...]],
        read: Callable[[], Rows],
    ) -> None:
        name, text, labels = told

        def collect() -> Metric:
            metric = family(name, text, labels=labels)
            for values, value in read().items():
                metric.add_metric([self._registry.model_name, *values], value)
            return metric

        self._registry.collectors.register(_OneMetric(collect))


class _OneMetric(Collector):
    """A metric that is built at each scrape."""

    def __init__(self, make: Callable[[], Metric]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        yield self._make()
