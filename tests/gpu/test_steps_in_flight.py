"""Steps in flight: tokens are the same at any depth, after any events."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.outputs import FinishReason
from legato.core.request import AbortRequest, AddRequest
from legato.core.step_record import StepRecord
from legato.executor.draw import uniform_numbers
from legato.gpu.gpu_executor import GpuExecutor
from legato.gpu.slots import Slots
from legato.speculation.drafter import Drafter
from tests.gpu.executors import MAX_LEN, Engine, request
from tests.gpu.host_twin import HostTwin
from tests.gpu.token_program import VOCAB_SIZE, TokenProgram, greedy, logits_after
from tests.profiles import examples
from tests.scheduler.foretold import Foretold, token_in

BLOCK_SIZE = 4
MAX_SEQS = 3
EOS = 5
SETTINGS: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3},
    "penalized": {"frequency_penalty": 2.0, "repetition_penalty": 1.5},
    "biased": {"logit_bias": {4: 12.0, 9: 15.0}, "temperature": 0.5},
    "not yet": {"min_tokens": 5},
    "scored": {"logprobs": 2},
    "limited": {"allowed_token_ids": tuple(range(0, VOCAB_SIZE, 3))},
}


@dataclass(frozen=True)
class Machine:
    depth: int = 1
    num_blocks: int = 64
    num_slots: int = 0
    budget: int = 64
    pads: bool = False
    num_drafts: int = 4

    def engine(self, *drafters: Drafter) -> tuple[Engine, TokenProgram]:
        twin, blocks = HostTwin(), {"block_size": BLOCK_SIZE, "num_blocks": self.num_blocks}
        program = TokenProgram(
            twin, num_slots=self.depth * MAX_SEQS, max_len=MAX_LEN, pads=self.pads, **blocks
        )
        executor = GpuExecutor(program, twin, depth=self.depth, host_sizes=[self.num_slots])
        engine = Engine(
            executor,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=self.budget,
            admission_optimism=1.0,
            num_slots=self.num_slots,
            drafters=drafters,
            speculative=self.num_drafts,
            **blocks,
        )
        return engine, program


machines = st.builds(
    Machine,
    depth=st.integers(1, 3),
    num_blocks=st.integers(17, 30),
    num_slots=st.sampled_from([0, 6]),
    budget=st.integers(4, 40),
    pads=st.booleans(),
    num_drafts=st.integers(1, 5),
)


def ask(name: str, kind: str, length: int) -> AddRequest:
    """Prompts begin alike, so that they share blocks."""
    prompt = [(i * i + (len(name) if i > 9 else 0)) % VOCAB_SIZE for i in range(length)]
    return request(name, prompt, (EOS,), max_tokens=20, **SETTINGS[kind])


def test_tokens_are_those_that_follow_the_prompt() -> None:
    engine, _ = Machine().engine()
    asked = request("it", [1, 2, 3], max_tokens=9)
    assert engine.run([asked])["it"] == greedy([1, 2, 3], 9)


@given(data=st.data())
@examples(40)
def test_neither_depth_nor_neighbours_nor_faults_nor_drafts_change_a_token(
    data: st.DataObject,
) -> None:
    kinds = data.draw(st.lists(st.sampled_from([*SETTINGS]), min_size=1, max_size=6), "kinds")
    asked = [ask(f"{i}" * (i + 1), kind, 1 + 7 * i % 23) for i, kind in enumerate(kinds)]
    undisturbed = {one.request_id: alone(one) for one in asked}
    wrong = data.draw(st.none() | st.sets(st.integers(0, 40), max_size=12), "wrong guesses")
    drafters = [] if wrong is None else [knowing(asked, undisturbed, wrong)]
    engine, program = data.draw(machines, "machine").engine(*drafters)
    # What is run again at once succeeds, or else nothing would be left of the engine.
    for number in data.draw(st.sets(st.sampled_from(range(3, 40, 5)), max_size=4), "faults"):
        error = data.draw(st.sampled_from([RuntimeError("boom"), MemoryError("full"), None]))
        program.faults[number] = error
    aborted = data.draw(st.sets(st.sampled_from(asked).map(lambda r: r.request_id)), "aborted")
    engine.outputs += engine.step(asked[:4])
    engine.outputs += engine.step([AbortRequest(request_id=name) for name in sorted(aborted)])
    asked = [r for i, r in enumerate(asked) if i < 4 or r.request_id not in aborted]
    tokens = engine.run(asked[4:])
    ends = {o.request_id: o.finish_reason for o in engine.outputs if o.finish_reason}
    assert ends.keys() == {r.request_id for r in asked}
    for one in asked:
        found, expected = tokens.get(one.request_id, []), undisturbed[one.request_id]
        if ends[one.request_id] in (FinishReason.ERROR, FinishReason.ABORT):
            assert found == expected[: len(found)]
        else:
            assert found == expected
    assert engine.stats.kv_usage == 0.0


@pytest.mark.parametrize("depth", [2, 3])
def test_a_step_is_planned_behind_those_whose_tokens_are_unknown(depth: int) -> None:
    engine, program = Machine(depth=depth).engine()
    engine.outputs += engine.step([ask("it", "greedy", 9)])
    assert program.num_runs == depth, "only the oldest was waited for"
    assert engine.run()["it"] == alone(ask("it", "greedy", 9))


@pytest.mark.parametrize(
    ("wrong", "starts"),
    [
        (set[int](), [10, 15, 20]),
        ({10, 11, 12}, [10, 11, 12, 17]),
        ({12}, [10, 12, 17, 22]),
    ],
    ids=["right", "wrong from the token in flight on", "a draft is wrong"],
)
def test_drafts_are_verified_behind_a_token_that_only_the_device_has(
    wrong: set[int], starts: list[int]
) -> None:
    """Beside a neighbour whose drafts are all wrong."""
    asked = [ask("it", "drawn", 9), ask("other", "greedy", 9)]
    undisturbed = {one.request_id: alone(one) for one in asked}
    drafter = knowing(asked, undisturbed, wrong, ["other"])
    engine, _ = Machine(depth=2).engine(drafter)
    engine.set_recording(is_on=True)
    assert engine.run(asked) == undisturbed
    steps = [record for record in engine.take_records() if isinstance(record, StepRecord)]
    chunks = [chunk for step in steps for chunk in step.chunks if chunk.request_id == "it"]
    verified = [chunk for chunk in chunks if chunk.kind == "verify"]
    assert [chunk.start for chunk in verified][: len(starts)] == starts
    assert steps[2].started_s < steps[1].ended_s, "it was planned while the token was in flight"


def test_what_needs_values_waits_for_them() -> None:
    engine, program = Machine(depth=2).engine()
    engine.step([ask("it", "penalized", 9)])
    assert program.num_runs == 1


def test_steps_behind_one_that_failed_are_forgotten() -> None:
    engine, program = Machine(depth=3).engine()
    asked = [ask("it", "greedy", 9), ask("other", "drawn", 3)]
    program.faults[2] = None
    assert engine.run(asked)["it"] == alone(asked[0])
    assert engine.stats.num_failed_steps == 1


def alone(one: AddRequest) -> list[int]:
    """Its tokens where it has no neighbours, and there is one step after the other."""
    return Machine().engine()[0].run([one])[one.request_id]


def knowing(
    asked: Sequence[AddRequest],
    outputs: Mapping[str, Sequence[int]],
    wrong: Collection[int],
    always_wrong: Collection[str] = (),
) -> Foretold:
    """A drafter that is wrong at some positions, or of some requests."""
    rows = {one.request_id: [*one.prompt_token_ids, *outputs[one.request_id]] for one in asked}
    return Foretold(token_in(rows), lambda name, at: not (at in wrong or name in always_wrong))


def test_random_numbers_are_those_of_the_host() -> None:
    engine, _ = Machine(depth=2).engine()
    tokens, prompt = engine.run([request("it", [1, 2], temperature=1.0, seed=3)])["it"], [1, 2]
    points = uniform_numbers(np.full(8, 3), np.arange(8))
    for count, point in enumerate(points):
        logits, shift = logits_after([*prompt, *tokens[:count]]), int(point * VOCAB_SIZE)
        assert tokens[count] == (int(np.roll(logits, shift).argmax()) - shift) % VOCAB_SIZE


def test_a_slot_is_taken_from_who_has_been_away_longest() -> None:
    slots = Slots(2)
    first = dict(zip("ab", slots.take(["a", "b"]), strict=True))
    assert slots.take(["a"]) == [first["a"]]
    assert slots.take(["c", "a"]) == [first["b"], first["a"]]
    slots.drop(["a", "nobody"])
    assert slots.take(["b"]) == [first["a"]]
