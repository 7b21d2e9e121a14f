"""Random traffic through the real scheduler and cache, on a virtual clock."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from tests.scheduler.drafters import RandomDrafter, RandomDraftModel
from tests.scheduler.harness import VOCAB_SIZE, Harness, coming
from tests.scheduler.step_times import calibrate, noise_of, truth

from legato.core.kv_transfer import FetchBlocks, SendBlocks
from legato.core.outputs import RequestOutput
from legato.core.plan import RowCut, StepPlan
from legato.core.slo import SloClass
from legato.executor.simulated import VirtualClock
from legato.kv.state_slots import StateSlots
from legato.kv.window_group import WindowGroup
from legato.kv.window_groups import WindowGroups
from legato.kv.window_need import WindowNeed
from legato.scheduler.order import ORDERS
from legato.scheduler.policy import POLICIES
from legato.scheduler.step_costs import ROW_BOUNDS, StepCosts
from legato.scheduler.step_time import StepTimeModel

_MAX_MODEL_LEN, _WITH_STATES = 64, 160
"""Tokens of the longest request. Chunks that end where recurrences do need longer prompts."""
_BLOCK_SIZE = 4
_MOST_RUNNING, _MOST_FREE_ROWS = 8, 40
"""Most requests that run, and most rows of a step beside a whole prompt and a row of each."""
_SECONDS = (0.001, 0.02, 0.1, 0.3, 1.0, 5.0)
"""Of promises: from what no step can keep to what every step does."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What a step was like.

    Attributes:
        did: what happened before it.
        outputs: that came since the line before.
    """

    did: str
    plan: StepPlan | None
    stats: Any
    state: Any
    outputs: list[RequestOutput]


class RecordingHarness(Harness):
    """Keeps the outputs that come between two steps."""

    def __init__(self, **settings: Any) -> None:
        self.outputs: list[RequestOutput] = []
        super().__init__(**settings)

    def take(self, outputs: list[RequestOutput]) -> None:
        self.outputs += outputs
        super().take(outputs)


class Traffic:
    """One seed's scheduler, and what happens to it.

    Every choice is drawn from the seed alone, so that two versions of the scheduler meet the same
    events until their plans differ.
    """

    def __init__(self, seed: int) -> None:
        self._random = rng = random.Random(seed)
        self._ids = map(str, itertools.count())
        self._tenants = [f"tenant-{i}" for i in range(rng.choice([1, 1, 2, 5, 20]))]
        depth = rng.choice([1, 1, 2, 3])
        keeps_blocks = rng.random() < 0.8
        states = self._states(depth, keeps=keeps_blocks) if rng.random() < 0.25 else None
        self._max_len = _MAX_MODEL_LEN if states is None else _WITH_STATES
        fewest = self._max_len // _BLOCK_SIZE  # a longer request would wait for ever
        windows = self._windows(depth) if states is None and rng.random() < 0.25 else None
        costs = self._costs()
        model = StepTimeModel(
            calibrate(costs, self._max_len) if rng.random() < 0.7 else (),
            drops_rows=depth == 1 and states is None,
        )
        clock = VirtualClock()
        drafter = RandomDrafter(coming, seed, vocab_size=VOCAB_SIZE)
        draft_model = RandomDraftModel(
            coming,
            clock,
            seed,
            vocab_size=VOCAB_SIZE,
            pass_s=rng.choice([1e-4, 2e-3, 2e-2]),
            row_s=rng.choice([1e-5, 1e-3]),
        )
        self._harness = RecordingHarness(
            num_blocks=rng.choice([fewest, fewest + 4, 2 * fewest + 8, 200]),
            block_size=_BLOCK_SIZE,
            max_model_len=self._max_len,
            max_waiting=rng.choice([12, 200]),
            enable_prefix_caching=keeps_blocks,
            num_host_slots=rng.choice([0, 4, 40]) if states is None else 0,
            states=states,
            windows=windows,
            depth=depth,
            drafters=[drafter] if rng.random() < 0.6 else [],
            draft_model=draft_model if rng.random() < 0.4 else None,
            clock=clock,
            step_time=model,
            step_time_s=truth(costs, noise_of(seed)),
            **self._settings(),
        )

    def lines(self, num_steps: int) -> Iterator[Line]:
        """Let things happen until so many steps are planned or there is nothing to plan."""
        harness = self._harness
        for _ in range(num_steps):
            did = self._let_happen()
            plan = harness.plan() if len(harness.in_flight) < harness.depth else None
            scheduler = harness.scheduler
            yield Line(
                did=did,
                plan=plan,
                stats=scheduler.stats,
                state=scheduler.state(harness.clock()),
                outputs=harness.outputs,
            )
            harness.outputs = []
            if harness.in_flight and self._random.random() < 0.9:
                self._land()

    def _let_happen(self) -> str:
        """Do something that is possible now; return its name."""
        rng, harness = self._random, self._harness
        chances: list[tuple[Callable[[], object], float]] = [
            (self._add, 0.5),
            (self._nothing, 0.3),
            (self._wait, 0.05),
        ]
        if harness.added:
            chances.append((self._abort, 0.04))
        if not harness.in_flight:
            chances += [(self._reconfigure, 0.01), (harness.kv.forget, 0.01)]
        if harness.holds:
            chances.append((self._transfer, 0.2))
        act = rng.choices([act for act, _ in chances], [chance for _, chance in chances])[0]
        act()
        return act.__name__.strip("_")

    def _nothing(self) -> None:
        pass

    def _add(self) -> None:
        rng = self._random
        for _ in range(rng.choice([1, 1, 1, 2, 6])):
            length = rng.choice([rng.randint(1, 6), rng.randint(1, self._max_len - 1)])
            fork, tail = rng.choice([0, 4, 10, 16, self._max_len]), rng.randint(1, 3)
            self._harness.add(
                next(self._ids),
                prompt=[0 if i < fork else tail for i in range(length)],
                max_tokens=rng.choice([12, 20, 1, 2, 5]),
                eos_token_ids=rng.choice([(), (), range(0, VOCAB_SIZE, 4)]),
                logprobs=rng.choice([None, None, None, 0]),
                prompt_logprobs=rng.choice([None, None, None, None, 0]),
                kv_role=rng.choice([None] * 6 + ["send", "fetch"]),
                pooling=rng.choice([None] * 8 + ["last", "mean"]),
                tenant=rng.choice(self._tenants),
                slo_class=rng.choice(["interactive", "batch", "other"]),
                priority=rng.randint(-3, 3),
                cache_salt=rng.choice([None, None, None, "a"]),
                allow_best_effort=rng.random() < 0.3,
            )

    def _wait(self) -> None:
        clock = self._harness.clock
        clock.advance_to(clock() + self._random.uniform(0.01, 5.0))

    def _abort(self) -> None:
        self._harness.abort(self._random.choice(sorted(self._harness.added)))

    def _reconfigure(self) -> None:
        settings = self._settings()
        self._harness.reconfigure(max_num_batched_tokens=settings.pop("budget"), **settings)

    def _transfer(self) -> None:
        rng, harness = self._random, self._harness
        hold = harness.holds[rng.choice(sorted(harness.holds))]
        if isinstance(hold.transfer, SendBlocks):
            harness.end_transfer(hold.request_id)
            return
        assert isinstance(hold.transfer, FetchBlocks)
        num_blocks = rng.randint(0, (hold.end - hold.num_arrived) // hold.block_size)
        num_tokens = hold.num_arrived + num_blocks * hold.block_size
        harness.arrive(hold.request_id, num_tokens, is_over=rng.random() < 0.5)

    def _land(self) -> None:
        """The oldest step ends, mostly well."""
        rng, harness = self._random, self._harness
        plan = harness.in_flight[0]
        chance = rng.random()
        if chance < 0.02:
            ids = sorted(chunk.request_id for chunk in plan.chunks)
            failing = rng.sample(ids, rng.randint(0, min(2, len(ids))))
            harness.run(plan, failing, out_of_memory=rng.random() < 0.5)
        elif chance < 0.1 and plan.deadline is not None:
            certain = sum(chunk.num_tokens for chunk in plan.chunks if chunk.kind != "prefill")
            num_rows = rng.randint(certain + 1, plan.num_tokens)
            cuts = (RowCut(0.5, num_rows),) if num_rows < plan.num_tokens else ()
            harness.run_first_rows(num_rows, cuts, rng.choice([None, 0.05]))
        else:
            harness.run(plan)

    def _settings(self) -> dict[str, Any]:
        """Fields of `SchedulerConfig` that go together."""
        rng = self._random
        has_pace = rng.random() < 0.6
        is_chunked = has_pace or rng.random() < 0.8
        budget, max_num_seqs = rng.randint(1, _MOST_FREE_ROWS), rng.randint(1, _MOST_RUNNING)
        interactive, other = self._class(has_pace), self._class(has_pace)
        promises_ttft = interactive.ttft_s is not None or other.ttft_s is not None
        return {
            "policy": "stall-free" if has_pace else rng.choice(sorted(POLICIES)),
            "enable_chunked_prefill": is_chunked,
            "budget": budget if is_chunked else self._max_len + max_num_seqs + budget,
            "max_num_seqs": max_num_seqs,
            "prefill_order": rng.choice(sorted(ORDERS)),
            "itl_slo_s": interactive.itl_s,
            "tpot_slo_s": interactive.tpot_s,
            "ttft_slo_s": interactive.ttft_s,
            "slo_classes": {"other": other},
            "max_wait_s": rng.choice([10.0, 0.3]),
            "shed_load": promises_ttft and rng.random() < 0.5,
            "admission_optimism": rng.choice([0.5, 0.0, 1.0]),
            "speculative": rng.choice([3, 1, "auto", "auto", "off"]),
        }

    def _class(self, has_pace: bool) -> SloClass:
        rng = self._random
        ttft_s = rng.choice([None, *_SECONDS])
        if not has_pace:
            return SloClass(ttft_s=ttft_s)
        if rng.random() < 0.3:
            return SloClass(
                itl_s=rng.choice([None, *_SECONDS]), tpot_s=rng.choice(_SECONDS), ttft_s=ttft_s
            )
        return SloClass(itl_s=rng.choice(_SECONDS), ttft_s=ttft_s)

    def _costs(self) -> StepCosts:
        def seconds(largest: float) -> float:
            return self._random.choice([0.0, self._random.uniform(largest / 1000.0, largest)])

        return StepCosts(
            step_s=self._random.uniform(0.001, 0.05),
            row_s=tuple(seconds(0.002) for _ in range(len(ROW_BOUNDS) + 1)),
            decode_row_s=seconds(0.002),
            decode_context_s=seconds(0.0001),
            chunk_s=seconds(0.005),
            area_s=seconds(0.0001),
            context_s=seconds(0.0001),
            sample_s=seconds(0.001),
        )

    def _states(self, depth: int, *, keeps: bool) -> StateSlots:
        unit = self._random.choice([4, 8])
        return StateSlots(
            self._random.choice([3, 8]),
            depth,
            block_size=_BLOCK_SIZE if keeps else None,
            num_spare_slots=self._random.choice([0, 2, 20]),
            unit=unit,
            spacing=2 * unit,
            num_host_slots=0,
        )

    def _windows(self, depth: int) -> WindowGroups:
        """Two windows, with the blocks that most requests need and perhaps some more."""
        rng = self._random
        num_requests = rng.randint(1, _MOST_RUNNING)
        groups: list[WindowGroup] = []
        for window in rng.choice([(8,), (5, 16)]):
            need = WindowNeed.of(
                window,
                block_bytes=1,
                block_size=_BLOCK_SIZE,
                rows_in_flight=depth * (_MAX_MODEL_LEN + _MOST_RUNNING + _MOST_FREE_ROWS),
                longest=_MAX_MODEL_LEN // _BLOCK_SIZE,
            )
            num_blocks = need.num_blocks(num_requests) + rng.choice([0, 10])
            groups.append(WindowGroup(window, num_blocks, _BLOCK_SIZE))
        return WindowGroups(groups, block_size=_BLOCK_SIZE, max_requests=num_requests)
