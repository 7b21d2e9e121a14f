"""Complete measurements of a server, with progress in the terminal.

All raise ConfigError if the server does not answer or does not serve the model.
"""

import asyncio

from legato.core.errors import ConfigError
from legato_lab.capacity.rule import CapacityRule, TrialWatch
from legato_lab.capacity.search import Capacity, SearchSettings, find_capacity
from legato_lab.capacity.trial import Load
from legato_lab.capacity.unloaded import UnloadedTtft, unloaded_workload
from legato_lab.load.client import Address, Client, ServedModel, connect
from legato_lab.load.open_loop import send_workload, warm_up
from legato_lab.load.vocabulary import prompt_vocab_size
from legato_lab.report.console import print_trial, progress_bar
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.workload import RandomPrompts, Workload, WorkloadRequest
from legato_lab.workload.choice import WorkloadChoice

_IDLE_FACTOR = 2.0
_IDLE_SLACK_S = 0.1
_IDLE_PATIENCE = 60  # checks, one a second


async def ask_model(address: Address) -> ServedModel:
    """Return the model of an address."""
    async with connect(address) as client:
        return client.model


async def random_prompts(address: Address, *, vocab_size: int | None, seed: int) -> RandomPrompts:
    """Make prompts of the model's tokens; arguments and errors as of `prompt_vocab_size`."""
    async with connect(address) as client:
        size = await prompt_vocab_size(client, vocab_size)
    return RandomPrompts(vocab_size=size, seed=seed)


async def run_workload(
    address: Address,
    workload: Workload,
    prompts: RandomPrompts,
    *,
    max_concurrency: int | None = None,
) -> list[RequestRecord]:
    """Warm the server up, then send the workload."""
    async with connect(address) as client:
        await warm_up(client, workload, prompts)
        with progress_bar("requests", len(workload)) as on_progress:
            return await send_workload(
                client,
                workload,
                prompts,
                max_concurrency=max_concurrency,
                on_progress=on_progress,
            )


def search_capacity(
    address: Address, choice: WorkloadChoice, prompts: RandomPrompts, settings: SearchSettings
) -> Capacity:
    """Measure the idle server, then search for its capacity."""
    source = choice.trials()

    def run_trial(load: Load, workload: Workload) -> list[RequestRecord]:
        return asyncio.run(_run_trial(address, workload, prompts, rule, load))

    unloaded = asyncio.run(_measure_unloaded(address, source.requests, prompts))
    rule = settings.rule(unloaded)
    return find_capacity(run_trial, source, rule, settings, print_trial)


async def _measure_unloaded(
    address: Address, workload: Workload, prompts: RandomPrompts
) -> UnloadedTtft:
    alone = unloaded_workload(workload)
    async with connect(address) as client:
        with progress_bar("idle server", len(alone)) as on_progress:
            records = await send_workload(
                client, alone, prompts, max_concurrency=1, on_progress=on_progress
            )
    return UnloadedTtft.of(records)


async def _run_trial(
    address: Address,
    workload: Workload,
    prompts: RandomPrompts,
    rule: CapacityRule,
    load: Load,
) -> list[RequestRecord]:
    """Send the workload to the idle server until the trial ends or is lost."""
    async with connect(address) as client:
        await _wait_until_idle(client, prompts, rule.unloaded)
        with progress_bar(f"{load.rate_per_s:.3g}/s", len(workload)) as on_progress:
            return await send_workload(
                client,
                workload,
                prompts,
                on_progress=on_progress,
                until_s=load.end_s,
                stop_when=TrialWatch(rule, load, workload).is_lost,
            )


async def _wait_until_idle(client: Client, prompts: RandomPrompts, unloaded: UnloadedTtft) -> None:
    """Wait until a short prompt gets its first token as fast as on an idle server."""
    shortest = unloaded.num_prompt_tokens[0]
    limit_s = _IDLE_FACTOR * unloaded.at(shortest) + _IDLE_SLACK_S
    for _ in range(_IDLE_PATIENCE):
        [record] = await send_workload(client, [WorkloadRequest(0.0, shortest, 1)], prompts)
        if record.ttft_s is not None and record.ttft_s <= limit_s:
            return
        await asyncio.sleep(1.0)
    raise ConfigError("the server does not become idle between two trials")
