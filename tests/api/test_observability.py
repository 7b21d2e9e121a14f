"""The reference, the dashboard and the alerts name the metrics that a server has."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser as promql
import pytest
import yaml
from grafana import dashboard, panels, reference
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.api.launch import ServerProcess

ROOT = Path(__file__).parents[2]
_TARGET = {"instance", "job"}  # labels that Prometheus adds to all that it scrapes
_CHOSEN = {"$model": ".*", "$__rate_interval": "1m"}  # as Grafana does

ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((ROOT / "grafana" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
QUERIES = {
    f"{panel.title}, {legend}": query
    for row in panels.ROWS.values()
    for panel in row
    for legend, query in panel.queries.items()
}


@pytest.fixture(scope="module")
def families(watched: ServerProcess) -> list[Metric]:
    """Of a server that keeps a promise, after a request and an error."""
    watched.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})
    watched.http.post("/v1/completions", json={})
    text = watched.http.get("/metrics").text
    # prometheus_client makes the others of its own.
    return [f for f in text_string_to_metric_families(text) if not f.name.endswith("_created")]


@pytest.fixture(scope="module")
def labels(families: list[Metric]) -> dict[str, set[str]]:
    """Key the name of a sample. Names without samples here, such as replicas', are as declared."""
    labels: dict[str, set[str]] = {"up": set()}
    declared = {
        metric.name: {*_TARGET, "model_name", *metric.labels} for metric in reference.declared()
    }
    for family in families:
        if not family.samples:
            assert _has_none_here(family), f"nothing shows the labels of {family.name}"
            labels[family.name] = declared[family.name]
        for sample in family.samples:
            labels.setdefault(sample.name, set(_TARGET)).update(sample.labels)
    return labels


def test_a_server_shows_what_is_declared(families: list[Metric]) -> None:
    declared = {metric.name: (metric.kind, set(metric.labels)) for metric in reference.declared()}
    own = [family for family in families if not family.name.startswith("vllm:")]  # for routers
    shown = {family.name: (family.type, _own_labels(family)) for family in own}
    for family in own:
        if not family.samples:
            assert _has_none_here(family)
            shown[family.name] = family.type, declared[family.name][1]
    assert declared == shown


@pytest.mark.parametrize("made", [reference, dashboard])
def test_what_is_made_of_declarations_is_up_to_date(made: ModuleType) -> None:
    assert made.FILE.read_text(encoding="utf-8") == made.text(), "python -m grafana"


def _has_none_here(family: Metric) -> bool:
    """Whether it is of replicas, or of windows of layers: this server has neither."""
    return family.name.startswith(("legato:replica_", "legato:kv_window_"))


def _own_labels(family: Metric) -> set[str]:
    return {name for s in family.samples for name in s.labels} - {"model_name", "le"}


@pytest.mark.parametrize("query", [*QUERIES.values(), *ALERTS.values()], ids=[*QUERIES, *ALERTS])
def test_a_query_asks_for_what_there_is(query: str, labels: dict[str, set[str]]) -> None:
    for variable, value in _CHOSEN.items():
        query = query.replace(variable, value)
    nodes = list(_nodes(promql.parse(query)))
    selectors = [node for node in nodes if isinstance(node, promql.VectorSelector)]
    assert selectors
    known: set[str] = set()
    for selector in selectors:
        assert selector.name in labels
        known |= labels[selector.name] | _TARGET
        assert {matcher.name for matcher in selector.matchers.matchers} <= known
    for node in nodes:
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= known


def _nodes(expression: promql.Expr) -> Iterator[promql.Expr]:
    nodes: list[promql.Expr] = []
    promql.walk(expression, nodes.append)
    yield from nodes


def test_the_dashboard_shows_all_that_is_declared() -> None:
    shown = set(re.findall(r"(?:legato:|process_)\w+", " ".join(QUERIES.values())))
    shown |= {re.sub("_(total|bucket|sum|count)$", "", name) for name in shown}
    assert {metric.name for metric in reference.declared()} - shown == panels.NOT_SHOWN


LATENCIES = (
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "time_to_first_token_seconds",
)
TIMES = (
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_max_num_generation_tokens",
)
NUMBERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_success_total",
)
# What vLLM's own examples/observability/prometheus_grafana/grafana.json asks for.
VLLM_DASHBOARD = {
    *(f"vllm:{name}_{part}" for name in LATENCIES for part in ("bucket", "sum", "count")),
    *(f"vllm:{name}_sum" for name in TIMES),
    *(f"vllm:{name}" for name in NUMBERS),
}
_SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}


def test_vllms_dashboard_finds_all_that_it_asks_for() -> None:
    told = reference.declared("vllm")
    assert {m.name + suffix for m in told for suffix in _SUFFIXES[m.kind]} >= VLLM_DASHBOARD
    [success] = [metric for metric in told if metric.name == "vllm:request_success"]
    assert success.labels == ("finished_reason",)
    for metric in told:
        assert metric.name.startswith(("legato:",) if metric.is_own else ("vllm:", "process_"))


def test_grafana_knows_all_that_the_dashboard_says() -> None:
    """Its own types take in every field, and give it back as it was."""
    register_default_plugins()
    told = json.loads(dashboard.text())
    read = json.loads(json.dumps(Dashboard.from_json(told), cls=JSONEncoder))
    assert _common(told, read) == told


def _common(told: Any, read: Any) -> Any:
    """What was read, without the defaults of fields that were not told."""
    if isinstance(told, dict):
        return {key: _common(told[key], read[key]) for key in told.keys() & read.keys()}
    if isinstance(told, list) and len(told) == len(read):
        return [_common(*pair) for pair in zip(told, read, strict=True)]
    return read
