"""Makes metrics under one prefix, the first label of each of which is the model's name."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

PREFIX = "legato:"
MODEL_LABEL = "model_name"

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)


class Labelled(Generic[_Metric]):
    """A metric with further labels, whose values `of` takes in their order."""

    def __init__(self, metric: _Metric, model_name: str) -> None:
        self._metric = metric
        self._model_name = model_name

    def of(self, *values: str) -> _Metric:
        return self._metric.labels(self._model_name, *values)

    def clear(self) -> None:
        """Forget all values."""
        self._metric.clear()


class MetricRegistry:
    """Args: model_name: value of every metric's first label."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._registry = CollectorRegistry()

    def counter(self, name: str, text: str, *labels: str) -> Labelled[Counter]:
        """Prometheus appends "_total" to its name."""
        metric = Counter(PREFIX + name, text, (MODEL_LABEL, *labels), registry=self._registry)
        return Labelled(metric, self.model_name)

    def gauge(self, name: str, text: str, *labels: str) -> Labelled[Gauge]:
        metric = Gauge(PREFIX + name, text, (MODEL_LABEL, *labels), registry=self._registry)
        return Labelled(metric, self.model_name)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], *labels: str
    ) -> Labelled[Histogram]:
        """Args: buckets: upper bounds, each of which belongs to its bucket."""
        metric = Histogram(
            PREFIX + name, text, (MODEL_LABEL, *labels), registry=self._registry, buckets=buckets
        )
        return Labelled(metric, self.model_name)

    def register(self, collector: Collector) -> None:
        """Add one that makes its metrics when they are asked for."""
        self._registry.register(collector)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
