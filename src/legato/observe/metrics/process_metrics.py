"""Processor time, memory and files of processes, as Prometheus clients commonly report them."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import cast

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from legato.observe.metrics.registry import MODEL_LABEL, Declaration, Kind, MetricRegistry

_LABEL = "process"
_SECTION = "Processes"


class ProcessMetrics(Collector):
    """`process_*` of several processes, labelled by name; only on Linux.

    Args:
        pids: called once a scrape; key the process's name.
    """

    def __init__(self, registry: MetricRegistry, pids: Callable[[], Mapping[str, int]]) -> None:
        self._model_name = registry.model_name
        self._pids = pids
        for metric in ProcessCollector(registry=None).collect():
            registry.declared.append(
                Declaration(
                    _SECTION,
                    cast("Kind", metric.type),
                    metric.name,
                    (_LABEL,),
                    metric.documentation,
                    is_own=False,
                )
            )
        registry.collectors.register(self)

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for process, pid in self._pids().items():
            labels = {MODEL_LABEL: self._model_name, _LABEL: process}
            for metric in ProcessCollector(pid=partial(int, pid), registry=None).collect():
                empty = Metric(metric.name, metric.documentation, metric.type)
                family = families.setdefault(metric.name, empty)
                for sample in metric.samples:
                    family.add_sample(sample.name, labels, sample.value)
        return families.values()
