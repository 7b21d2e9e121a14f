"""Runs simulations in other processes, or in this one if one is enough."""

from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context


def simulators(num_processes: int) -> Executor:
    """Return an executor for a number of simulations at once; use it as a context."""
    if num_processes == 1:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))
