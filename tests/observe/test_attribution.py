"""The parts of a wait are those of its schedule, and add up to the whole."""

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from legato.cli.explain import explanation
from legato.core.config import Speculative
from legato.core.errors import ConfigError
from legato.core.step_record import (
    AnswerRecord,
    EngineRecord,
    GrammarReady,
    RequestArrived,
    RequestEnded,
    ShortHit,
    StepRecord,
)
from legato.observe.traces.attribution import Attribution, Span
from legato.observe.traces.request_story import ObservedStep, RequestStory, read_story
from legato.observe.traces.trace_file import JsonlTrace, TraceHeader
from tests.observe.recorded import BETWEEN_S, STEP_S, TOKEN_S, answer_record, recorded_run

HEADER = TraceHeader(started_s=0.0, unix_s=0.0, settings={})


def story_of(records: list[EngineRecord], request_id: str) -> RequestStory:
    """As `read_story` puts it together, without a file."""
    story = RequestStory(request_id=request_id)
    for record in records:
        if isinstance(record, RequestArrived) and record.request_id == request_id:
            story.arrived = record
        elif isinstance(record, RequestEnded) and record.request_id == request_id:
            story.ended = record
            break
        elif isinstance(record, StepRecord) and story.arrived is not None:
            story.add_step(ObservedStep(record))
    return story


def first_token(records: list[EngineRecord], request_id: str) -> Span:
    span = Attribution(story_of(records, request_id)).first_token()
    assert span is not None
    return span


def test_a_prompt_alone_waits_for_itself() -> None:
    span = first_token(recorded_run([(0.0, 64, 1)], budget=32), "0")
    assert span.parts == pytest.approx(
        {
            "inbox": BETWEEN_S,
            "own_prefill": 2 * STEP_S + 64 * TOKEN_S,
            "between_steps": BETWEEN_S,
        }
    )


def test_who_waits_behind_a_prompt_waits_for_it() -> None:
    records = recorded_run([(0.0, 96, 1), (0.0, 16, 1)], budget=32)
    span = first_token(records, "1")
    full_s = STEP_S + 32 * TOKEN_S
    assert span.parts == pytest.approx(
        {
            "inbox": BETWEEN_S,
            "others_prefill": 3 * full_s,
            "own_prefill": STEP_S + 16 * TOKEN_S,
            "between_steps": 3 * BETWEEN_S,
        }
    )
    assert span.others == {"0": 96}


def test_who_waits_for_a_grammar_waits_for_that_and_for_no_step_meanwhile() -> None:
    records = recorded_run([(0.0, 96, 1), (0.0, 16, 1)], budget=32)
    story = story_of(records, "1")
    assert story.arrived is not None
    second = [record for record in records if isinstance(record, StepRecord)][1]
    ready_s = second.ended_s
    story.grammar = GrammarReady(request_id="1", ready_s=ready_s, compile_s=0.01)
    attribution = Attribution(story)
    span = attribution.first_token()
    assert span is not None
    assert span.parts == pytest.approx(
        {
            "inbox": BETWEEN_S,
            "grammar": ready_s - story.arrived.taken_s,
            "others_prefill": STEP_S + 32 * TOKEN_S,
            "own_prefill": STEP_S + 16 * TOKEN_S,
            "between_steps": 2 * BETWEEN_S,
        }
    )
    told = explanation(story, attribution, 0)
    waited_s = ready_s - story.arrived.taken_s
    assert f"It waited {waited_s:.4f} s for its grammar, 0.0100 s to compile it" in told


def test_tokens_that_are_computed_again_are_explained() -> None:
    records = [
        replace(record, short_hits={"1": ShortHit(8, 20, "checkpoint")})
        if isinstance(record, StepRecord) and "1" in record.admitted
        else record
        for record in recorded_run([(0.0, 96, 1), (0.0, 24, 1)], budget=32)
    ]
    story = story_of(records, "1")
    told = explanation(story, Attribution(story), 0)
    assert (
        "The blocks of its first 20 tokens were cached, but after token 8 no state of the "
        "recurrent layers was kept: 12 of these tokens were computed again"
    ) in told


def test_a_step_is_shared_by_tokens() -> None:
    records = recorded_run([(0.0, 8, 9), (0.02, 40, 1)], budget=32)
    parts = first_token(records, "1").parts
    # 31 of its tokens beside one of the stream's, and then 9.
    mixed_s, rest_s = STEP_S + 32 * TOKEN_S, STEP_S + 10 * TOKEN_S
    assert parts["own_prefill"] == pytest.approx(mixed_s * 31 / 32 + rest_s * 9 / 10)
    assert parts["others_decode"] == pytest.approx(mixed_s / 32 + rest_s / 10)
    gap = Attribution(story_of(records, "0")).gap(0)
    assert gap.parts["others_prefill"] == pytest.approx(mixed_s * 31 / 32)


def test_who_waits_for_a_place_is_in_the_queue() -> None:
    parts = first_token(recorded_run([(0.0, 8, 5), (0.0, 8, 1)], max_num_seqs=1), "1").parts
    assert parts["queue"] == pytest.approx(5 * STEP_S + 12 * TOKEN_S)


def test_who_waits_for_blocks_waits_for_memory() -> None:
    parts = first_token(recorded_run([(0.0, 20, 8), (0.0, 40, 1)], num_blocks=12), "1").parts
    assert parts["memory"] > 5 * STEP_S


def test_a_preempted_stream_waits_for_its_preemption() -> None:
    records = recorded_run([(0.0, 20, 20), (0.0, 20, 20)], num_blocks=16)
    [preempted] = {i for r in records if isinstance(r, StepRecord) for i in r.preempted}
    attribution = Attribution(story_of(records, preempted))
    gaps = attribution.gaps()
    longest = attribution.gap(gaps.index(max(gaps)))
    assert longest.parts["preemption"] > 0.5 * longest.seconds
    [loss] = [r for r in records if isinstance(r, StepRecord) and r.preempted]
    [chunk] = [
        chunk
        for step, chunk in story_of(records, preempted).own_chunks()
        if step.step_id > loss.step_id and chunk.kind == "prefill"
    ]
    token_s = STEP_S / chunk.num_tokens + TOKEN_S
    assert longest.parts["own_prefill"] == pytest.approx(token_s), "one of its tokens is new"


@given(
    arrivals=st.lists(
        st.tuples(st.floats(0.0, 0.5), st.integers(1, 60), st.integers(1, 12)),
        min_size=1,
        max_size=8,
    ),
    budget=st.integers(4, 64),
    num_blocks=st.integers(24, 80),
    max_num_seqs=st.integers(1, 6),
    depth=st.integers(1, 3),
    is_random=st.booleans(),
    speculative=st.sampled_from(["off", 1, 4]),
    vocab_size=st.integers(1, 3),
)
def test_parts_add_up(
    arrivals: list[tuple[float, int, int]],
    budget: int,
    num_blocks: int,
    max_num_seqs: int,
    depth: int,
    is_random: bool,
    speculative: Speculative,
    vocab_size: int,
) -> None:
    """Also where steps overlap, hold requests that had ended when they were computed, or bring
    several tokens of one."""
    records = recorded_run(
        sorted(arrivals),
        budget=budget,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        depth=depth,
        is_random=is_random,
        speculative=speculative,
        vocab_size=vocab_size,
    )
    for index in range(len(arrivals)):
        story = story_of(records, str(index))
        attribution = Attribution(story)
        assert story.ended is not None
        num_output = story.ended.num_output_tokens
        assert len(attribution.told_s) == num_output
        first = attribution.first_token()
        assert first is not None
        spans = [first, *map(attribution.gap, range(len(attribution.gaps())))]
        for span in spans:
            assert math.isclose(sum(span.parts.values()), span.seconds, abs_tol=1e-9)
            assert all(seconds > 0 for seconds in span.parts.values())
            assert "unrecorded" not in span.parts
        if not any(
            str(index) in step.preempted for step in records if isinstance(step, StepRecord)
        ):
            assert not any("preemption" in span.parts for span in spans)
        assert sum(span.seconds for span in spans) == pytest.approx(
            attribution.told_s[-1] - sorted(arrivals)[index][0]
        )


def test_steps_in_flight_together_share_no_time() -> None:
    """The second prompt comes during step 0, behind which step 1 is in flight; 2 has no room."""
    records = recorded_run([(0.0, 96, 1), (0.04, 16, 1)], budget=32, depth=2)
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert any(after.planned_s < step.ended_s for step, after in pairwise(steps))
    full_s = STEP_S + 32 * TOKEN_S
    first, second = first_token(records, "0"), first_token(records, "1")
    assert first.parts == pytest.approx({"inbox": BETWEEN_S, "own_prefill": 3 * full_s})
    assert second.parts == pytest.approx(
        {
            "inbox": steps[1].ended_s - 0.04,
            "others_prefill": full_s,
            "own_prefill": STEP_S + 16 * TOKEN_S,
        }
    )


def answered(records: list[EngineRecord], request_id: str) -> AnswerRecord:
    """An answer that took 5 ms to read, and 3 ms to write each token."""
    attribution = Attribution(story_of(records, request_id))
    return answer_record(
        request_id,
        received_s=-0.005,
        ended_s=attribution.came_s[-1] + 0.003,
        sent_s=[time_s + 0.003 for time_s in attribution.came_s],
    )


def test_a_gap_that_begins_in_a_step_has_to_do_with_no_later_one() -> None:
    """Though that may have been planned by then."""
    records = recorded_run([(0.0, 8, 6), (0.0, 70, 1)], budget=32, depth=2)
    story = story_of(records, "0")
    story.answer = answered(records, "0")
    attribution = Attribution(story)
    prompts = [step.chunks["1"].num_tokens if "1" in step.chunks else 0 for step in story.steps]
    assert prompts == [24, 31, 15, 0, 0, 0]
    for index in range(5):
        assert attribution.gap(index).others.total() == prompts[index + 1]


def test_drafts_are_a_streams_tokens() -> None:
    records = recorded_run([(0.0, 8, 9), (0.02, 40, 1)], budget=32)

    def with_drafts(record: EngineRecord) -> EngineRecord:
        if not isinstance(record, StepRecord):
            return record
        kinds = {"decode": "verify", "prefill": "prefill"}
        chunks = tuple(replace(chunk, kind=kinds[chunk.kind]) for chunk in record.chunks)
        return replace(record, chunks=chunks)

    for name in ("0", "1"):
        decoding = Attribution(story_of(records, name))
        verifying = Attribution(story_of([with_drafts(record) for record in records], name))
        assert verifying.first_token() == decoding.first_token()
        for index in range(len(decoding.gaps())):
            assert verifying.gap(index) == decoding.gap(index)


REPEATING = [(0.0, 8, 30), (0.03, 40, 1)]
"""A stream that drafts where outputs have few tokens, and a prompt beside it."""


def test_drafts_are_a_cause_of_their_own_to_whom_they_belong_and_to_others() -> None:
    records = recorded_run(REPEATING, speculative=4, vocab_size=1)
    steps = [record for record in records if isinstance(record, StepRecord)]

    def drafts_s(step: StepRecord) -> float:
        share = step.num_draft_tokens / (step.num_prefill_tokens + step.num_decode_tokens)
        return share * (step.ended_s - step.planned_s)

    prompt, stream = first_token(records, "1"), Attribution(story_of(records, "0"))
    beside = [step for step in steps if step.num_prefill_tokens and step.num_draft_tokens]
    assert beside
    assert prompt.parts["others_drafts"] == pytest.approx(sum(map(drafts_s, beside)))
    assert prompt.others_drafts == {"0": sum(step.num_draft_tokens for step in beside)}
    spans = [stream.gap(index) for index in range(len(stream.gaps()))]
    own_s = sum(span.parts.get("own_drafts", 0.0) for span in spans)
    assert own_s == pytest.approx(sum(map(drafts_s, steps)))
    assert not any("others_drafts" in span.parts for span in spans)


def test_it_is_recorded_what_drafts_are_expected_to_take() -> None:
    records = recorded_run([(0.0, 8, 240)], speculative=4, vocab_size=2)
    steps = [record for record in records if isinstance(record, StepRecord)]
    known = [step for step in steps if step.predicted_s is not None]
    assert {1, 4} <= {step.num_draft_tokens for step in known}
    for step in known:
        assert step.drafts_s == pytest.approx(TOKEN_S * step.num_draft_tokens, rel=0.2)
    assert all(step.drafts_share is None for step in steps if step not in known)


def test_drafts_have_what_they_are_expected_to_take() -> None:
    """The prompt's step holds as many of another's drafts at any cost of these."""

    def told(record: EngineRecord) -> EngineRecord:
        if not isinstance(record, StepRecord):
            return record
        return replace(record, predicted_s=0.009, drafting_s=0.001, drafts_s=0.001)

    records = recorded_run(REPEATING, speculative=4, vocab_size=1)
    by_tokens = first_token(records, "1")
    prompt = first_token([told(record) for record in records], "1")
    steps = [record for record in records if isinstance(record, StepRecord)]
    (step,) = [step for step in steps if step.num_prefill_tokens and step.num_draft_tokens]
    assert prompt.parts["others_drafts"] == pytest.approx(0.2 * (step.ended_s - step.planned_s))
    assert prompt.others_drafts == by_tokens.others_drafts
    gained = {cause: prompt.parts[cause] - by_tokens.parts[cause] for cause in prompt.parts}
    assert sum(gained.values()) == pytest.approx(0.0)
    num_decodes = step.num_decode_tokens - step.num_draft_tokens
    others = gained["others_decode"] / gained["own_prefill"]
    assert others == pytest.approx(num_decodes / step.num_prefill_tokens)


def test_tokens_that_come_together_have_no_gap_between_them() -> None:
    """Wrong drafts are no tokens, nor is what a step brings behind the request's end."""
    records = recorded_run(REPEATING, speculative=4, vocab_size=2)
    story = story_of(records, "0")
    attribution = Attribution(story)
    chunks = [chunk for _, chunk in story.own_chunks() if chunk.num_samples]
    assert {0, 4} <= {chunk.num_accepted for chunk in chunks if chunk.kind == "verify"}
    assert len(attribution.came_s) == len(attribution.told_s) == 30
    assert len(attribution.gaps()) == len(chunks) - 1
    assert min(attribution.gaps()) >= STEP_S
    together = [after - first for first, after in pairwise([*attribution.firsts, 30])]
    assert together == [chunk.num_accepted + 1 for chunk in chunks]
    assert story.ended is not None
    story.ended = replace(story.ended, num_output_tokens=28)
    assert len(Attribution(story).told_s) == 28


def test_what_the_client_was_not_sent_is_no_token_of_its_answer() -> None:
    """A stop string may end it in the middle of what one step brought."""
    records = recorded_run([(0.0, 8, 33)], speculative=4, vocab_size=1)
    whole = Attribution(story_of(records, "0"))
    last = whole.firsts[-1]
    assert last < 32, "its last step brought several"
    story = story_of(records, "0")
    sent_s = [time_s + 0.003 for time_s in whole.came_s[: last + 1]]
    story.answer = answer_record("0", sent_s=sent_s)
    attribution = Attribution(story)
    assert attribution.told_s == sent_s
    assert len(attribution.gaps()) == len(whole.gaps())


def test_drafts_are_told_in_words() -> None:
    records = recorded_run(REPEATING, speculative=4, vocab_size=1)
    told = {}
    for name in ("0", "1"):
        story = story_of(records, name)
        told[name] = "\n".join(explanation(story, Attribution(story), 99))
    chunks = [c for _, c in story_of(records, "0").own_chunks() if c.kind == "verify"]
    drafts, right = sum(c.num_drafts for c in chunks), sum(c.num_accepted for c in chunks)
    assert f"{drafts} drafts, {right} of them right" in told["0"]
    middle_s, per_token_s = re.findall(r"gaps: median (\S+) s.*per token (\S+) s", told["0"])[0]
    assert float(per_token_s) < float(middle_s)
    assert "by its own tokens" in told["0"]
    assert "drafts of its own next tokens" in told["0"]
    assert "drafts of others: 0 (" in told["1"]
    ends = "the step may hold no more tokens (1); nothing more was proposed (1)"
    assert f"why its steps held no more drafts: {ends}" in told["1"]
    alone = story_of(recorded_run(REPEATING), "0")
    assert "drafts" not in "\n".join(explanation(alone, Attribution(alone), 99))


def test_a_trace_from_before_there_were_drafts_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    trace = JsonlTrace(path, HEADER)
    trace.write(recorded_run())
    trace.close()
    text = path.read_text()
    for written in (
        ',"drafter":null,"num_accepted":0,"num_dropped":0',
        ',"drafts_ended_by":null,"drafting_s":0.0,"drafts_s":null',
    ):
        assert written in text
        text = text.replace(written, "")
    old = tmp_path / "old.jsonl"
    old.write_text(text)
    for name in ("0", "1", "2"):
        before, now = Attribution(read_story(old, name)), Attribution(read_story(path, name))
        assert before.told_s == now.told_s
        assert [before.gap(i) for i in range(len(before.gaps()))] == [
            now.gap(i) for i in range(len(now.gaps()))
        ]


def test_a_story_is_read_by_any_of_its_ids_and_told_in_words(tmp_path: Path) -> None:
    records = recorded_run()
    path = tmp_path / "t.jsonl"
    trace = JsonlTrace(path, HEADER)
    trace.write([*records, answered(records, "1")])
    trace.close()
    stories = [read_story(path, asked) for asked in ("1", "abc", "def", "chatcmpl-def")]
    for story in stories:
        assert story.request_id == "1"
        assert story.answer == answered(records, "1")
        first = Attribution(story).first_token()
        assert first is not None
        assert first.start_s == -0.005
        assert first.parts["http_out"] == pytest.approx(0.003)
        assert first.seconds == pytest.approx(sum(first.parts.values()))
    text = "\n".join(explanation(stories[0], Attribution(stories[0]), 1))
    assert "90 prompt tokens" in text
    assert "filled the token budget" in text
    assert "others' prompts: 2 (" in text
    with pytest.raises(ConfigError, match="no request 'chatcmpl-abc'"):
        read_story(path, "chatcmpl-abc")
