"""Who simulates: other processes, or this one where one is enough."""

from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context


def simulators(num_processes: int) -> Executor:
    """As many as simulate at once; to be used as a context."""
    if num_processes == 1:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))
