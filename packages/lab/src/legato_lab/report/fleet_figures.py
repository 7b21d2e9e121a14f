"""Figures of a simulated fleet's replicas, and their tables."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from legato.cli.table import NOTHING, Table, duration

_MOST_SHOWN = 16
"""The most replicas with a row each; of more, rows show the least, the median and the most."""


class ReplicaFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one replica.

    Attributes:
        started_s, ended_s: when it began to serve, and when it died, was drained, or the run ended.
        is_lost: whether it died.
        num_requests: that were sent there.
        busy_s: in steps, and between them.
        cached_share: share of the prompt tokens found in the cache; None without tokens.
    """

    replica_id: str
    role: str
    started_s: float
    ended_s: float
    is_lost: bool
    num_requests: int
    num_steps: int
    busy_s: float
    cached_share: float | None
    num_preemptions: int
    num_steps_over_budget: int

    @property
    def busy_share(self) -> float:
        served_s = self.ended_s - self.started_s
        return self.busy_s / served_s if served_s > 0.0 else 0.0


class FleetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a fleet.

    Attributes:
        num_tried_again: how often a request refused by a replica was sent to another.
        num_retries: how often clients sent a refused request again.
        num_reruns: requests rerun elsewhere because their replica died or hung.
        num_lost: requests that a dead replica ended.
    """

    replicas: list[ReplicaFigures]
    num_tried_again: int
    num_retries: int
    num_reruns: int
    num_lost: int

    def cells(self) -> dict[str, str]:
        """Return one column of a table; key the row's name."""
        served_s = sum(one.ended_s - one.started_s for one in self.replicas)
        busy_s = sum(one.busy_s for one in self.replicas)
        return {
            "replicas that served": str(len(self.replicas)),
            "of these died": str(sum(one.is_lost for one in self.replicas)),
            "replica hours": f"{served_s / 3600.0:.2f}",
            "busy": f"{busy_s / served_s:.1%}" if served_s else NOTHING,
            "refused, and tried elsewhere": str(self.num_tried_again),
            "refused, and sent again": str(self.num_retries),
            "run elsewhere": str(self.num_reruns),
            "lost with a replica": str(self.num_lost),
        }


_COLUMNS: dict[str, tuple[Callable[[ReplicaFigures], float], Callable[[float], str]]] = {
    "requests": (lambda one: one.num_requests, "{:.0f}".format),
    "steps": (lambda one: one.num_steps, "{:.0f}".format),
    "busy": (lambda one: one.busy_share, "{:.1%}".format),
    "from the cache": (lambda one: one.cached_share or 0.0, "{:.1%}".format),
    "preemptions": (lambda one: one.num_preemptions, "{:.0f}".format),
    "steps over budget": (lambda one: one.num_steps_over_budget, "{:.0f}".format),
    "from": (lambda one: one.started_s, duration),
    "to": (lambda one: one.ended_s, duration),
}
"""A replica's columns: value and format; key the header."""


def replica_table(title: str, replicas: Sequence[ReplicaFigures]) -> Table:
    """Return a row for each replica, or three for each role if there are many replicas."""
    if len(replicas) <= _MOST_SHOWN:
        rows = [[_name(one), *_row([one], 0.5)] for one in replicas]
    else:
        rows = [
            [f"{role}, {which}", *_row([one for one in replicas if one.role == role], quantile)]
            for role in dict.fromkeys(one.role for one in replicas)
            for which, quantile in (("least", 0.0), ("median", 0.5), ("most", 1.0))
        ]
    return Table(title, ["", *_COLUMNS], rows)


def _name(one: ReplicaFigures) -> str:
    return f"{one.replica_id}, died" if one.is_lost else one.replica_id


def _row(replicas: Sequence[ReplicaFigures], quantile: float) -> list[str]:
    return [
        written(float(np.quantile([value(one) for one in replicas], quantile)))
        for value, written in _COLUMNS.values()
    ]
