"""All Prometheus metrics of a server; docs/metrics.md is their reference."""

from collections.abc import Mapping

from legato.core.slo import SloClass
from legato.observe.metrics.engine_metrics import CacheSize, Engine, EngineCollector
from legato.observe.metrics.registry import MetricRegistry
from legato.observe.metrics.request_metrics import RequestMetrics
from legato.observe.metrics.slo_metrics import SloMetrics
from legato.observe.metrics.step_metrics import StepMetrics


class Metrics:
    """Everything that ``/metrics`` shows, in a registry of its own.

    Names and meanings are vLLM's, with the prefix ``legato:``.

    Args:
        model_name: label of every metric.
        engine: asked once a scrape.
        classes: of service; key the name.

    Attributes:
        requests, slos: what `JobRecorder` counts.
        steps: to be told of each step.
    """

    def __init__(
        self,
        model_name: str,
        engine: Engine,
        *,
        cache: CacheSize,
        classes: Mapping[str, SloClass],
    ) -> None:
        self._registry = MetricRegistry(model_name)
        self._registry.register(EngineCollector(model_name, engine, cache))
        self.requests = RequestMetrics(self._registry, classes)
        self.slos = SloMetrics(self._registry, classes)
        self.steps = StepMetrics(self._registry)

    def count_error(self, status: int) -> None:
        """Count an HTTP request that was answered with `status`."""
        self.requests.errors.of(str(status)).inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self._registry.render()
