"""The Grafana dashboard, made from its panels."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana.panels import ROWS, Panel

FILE = Path(__file__).with_name("grafana-dashboard.json")

# In Grafana's units
_ROW_WIDTH = 24
_WIDTH = 8
_HEIGHT = 8
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def dashboard() -> dict[str, Any]:
    """What Grafana imports; it asks for the data source."""
    return {
        "title": "Legato",
        "uid": "legato",
        "tags": ["legato", "llm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_panels()),
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": _SOURCE,
            "query": "label_values(legato:num_requests_running, model_name)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def _panels() -> Iterator[dict[str, Any]]:
    """Rows below each other, each with as many lines of panels as it takes."""
    per_line = _ROW_WIDTH // _WIDTH
    y = 0
    for title, panels in ROWS.items():
        yield {"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": _ROW_WIDTH, "h": 1}}
        y += 1
        for index, panel in enumerate(panels):
            line, column = divmod(index, per_line)
            yield _drawn(panel, column * _WIDTH, y + line * _HEIGHT)
        y += -(-len(panels) // per_line) * _HEIGHT


def _drawn(panel: Panel, x: int, y: int) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 20 if panel.stacked else 0,
                    "stacking": {"mode": "normal" if panel.stacked else "none"},
                },
            },
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _SOURCE,
                "expr": expr,
                "legendFormat": legend,
            }
            for i, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    """The file's contents."""
    return json.dumps(dashboard(), indent=2) + "\n"
