"""Metrics are rendered one by one, so that a scrape never holds the event loop for long."""

import itertools

from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from legato.observe.metrics.registry import MetricRegistry

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"


def registry() -> MetricRegistry:
    made = MetricRegistry("m")
    section = made.section("some")
    section.counter("steps", "Steps.").of().inc(3)
    section.histogram("seconds", "Seconds.", [0.1, 1.0], "kind").of("a").observe(0.5)
    section.gauge("streams", "Streams.")
    return made


def test_the_pieces_are_prometheus_text() -> None:
    made = registry()
    pieces, media_type = made.render()
    assert media_type.startswith("text/plain")
    rendered = list(pieces)
    assert len(rendered) == 3
    assert b"".join(rendered) == generate_latest(made.collectors)


def test_the_pieces_are_one_text_of_openmetrics() -> None:
    made = registry()
    pieces, media_type = made.render(OPENMETRICS)
    assert media_type.startswith("application/openmetrics-text")
    whole = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
        made.collectors, escaping=openmetrics.ALLOWUTF8
    )
    assert b"".join(pieces) == whole


def test_a_metric_is_read_when_its_turn_comes() -> None:
    made, readings = MetricRegistry("m"), itertools.count(1)
    section = made.section("some")
    for name in ["a", "b"]:
        section.read_gauge(name, "A gauge.", lambda: next(readings))
    pieces, _ = made.render()
    assert b" 1.0" in next(pieces)
    assert next(readings) == 2
