"""Recorded traffic, written by `legato serve --trace`."""

from pathlib import Path

from legato.core.errors import ConfigError
from legato.core.slo import INTERACTIVE
from legato.core.step_record import RequestArrived, RequestEnded
from legato.core.tenant import DEFAULT_TENANT
from legato.observe.traces.trace_file import read_trace
from legato_lab.simulation.workload import Workload, WorkloadRequest

RECORDED = b'{"kind":"trace"'
"""The first bytes of such a file."""


def read_recorded(path: Path) -> Workload:
    """Return the recorded requests that had ended; the output length of refused ones is a guess.

    Raises:
        ConfigError: the file cannot be read, or no request had ended.
    """
    _, lines = read_trace(path)
    arrived: dict[str, RequestArrived] = {}  # key: request id
    requests = []
    for line in lines:
        if isinstance(line, RequestArrived) and not line.is_rerun:
            arrived[line.request_id] = line
        elif isinstance(line, RequestEnded) and line.request_id in arrived:
            requests.append(_request(arrived.pop(line.request_id), line))
    if not requests:
        raise ConfigError(f"{path} has no requests that ended")
    return requests


def _request(arrival: RequestArrived, end: RequestEnded) -> WorkloadRequest:
    return WorkloadRequest(
        arrival.arrived_s,
        arrival.num_prompt_tokens,
        end.num_output_tokens or arrival.max_tokens or 1,
        None if arrival.slo_class == INTERACTIVE else arrival.slo_class,
        arrival.priority,
        None if arrival.tenant == DEFAULT_TENANT else arrival.tenant,
    )
