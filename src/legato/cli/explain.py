"""`legato explain`: where a request's time went."""

import argparse
import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from legato.cli.values import count, whole

if TYPE_CHECKING:
    from legato.core.step_record import DrafterName, DraftsEndedBy, Lack
    from legato.engine.replay.counterfactuals import Counterfactual, Explained
    from legato.observe.traces.attribution import Attribution, Cause, Span
    from legato.observe.traces.request_story import RequestStory

_WORDS: "dict[Cause, str]" = {
    "http_in": "HTTP: reading the request and tokenizing its prompt",
    "inbox": "waiting until the step that ran when it came had ended",
    "grammar": "until the grammar of its output was compiled",
    "queue": "in the queue, while other requests' tokens were computed",
    "memory": "in the queue, until blocks of the KV cache were free",
    "transfer": "until its prompt's blocks had come from another engine",
    "preemption": "preempted: waiting for blocks again, and computing again what was lost",
    "own_prefill": "computing its own prompt",
    "others_prefill": "others' prompts",
    "own_decode": "computing its own tokens",
    "others_decode": "the tokens of other streams in the same steps",
    "own_drafts": "drafts of its own next tokens",
    "others_drafts": "drafts of others",
    "yielded": "passed over, for streams with a promise",
    "between_steps": "between steps: what the engine does to tell and to be told",
    "unrecorded": "steps that the trace does not have",
    "http_out": "HTTP: from the engine to the client's socket",
}
_ENDS = {
    "prompt_end": "reached the prompt's end",
    "token_budget": "filled the token budget",
    "time_budget": "as long as a token's deadline allowed",
    "memory": "kept short after memory ran out",
    "turn": "shorter after a best-effort chunk",
    "checkpoint": "ended where a recurrent state is kept",
    "deadline": "lost rows for a token's deadline",
}
_LACKS: "dict[Lack, str]" = {
    "checkpoint": "no state of the recurrent layers was kept",
    "window": "blocks of a sliding window were not kept",
}
_DRAFTERS: "dict[DrafterName, str]" = {
    "own": "its own tokens",
    "recent": "recent outputs",
    "model": "the draft model",
}
_DRAFTS_END: "dict[DraftsEndedBy, str]" = {
    "proposals": "nothing more was proposed",
    "worth": "more were not worth their time",
    "time_budget": "the step may take no longer",
    "token_budget": "the step may hold no more tokens",
    "memory": "no blocks were free for more",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "explain",
        help="say where a request's time went",
        description="Say in words where the time to a request's first token went, and its longest "
        "gaps between tokens. The parts add up to what its client saw. Without a request, say "
        "which waited longest, and for what.",
    )
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="lines of JSON, as serve --trace FILE.jsonl"
    )
    parser.add_argument(
        "request_id",
        nargs="?",
        metavar="REQUEST_ID",
        help="the id of the answer (chatcmpl-...), X-Request-Id, or the engine's own id",
    )
    parser.add_argument(
        "--choice", type=whole, default=0, metavar="N", help="which completion (%(default)s)"
    )
    parser.add_argument(
        "--gaps", type=whole, default=3, metavar="N", help="longest gaps to explain (%(default)s)"
    )
    parser.add_argument(
        "--by",
        choices=("gap", "ttft"),
        default="gap",
        help="without a request: whose longest gap, or whose time to first token, was the longest",
    )
    parser.add_argument(
        "--most",
        type=count,
        default=20,
        metavar="N",
        help="without a request: rows to show, each of requests that waited alike (%(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain one request, or all; returns the exit status."""
    if args.request_id is None:
        _explain_all(args)
    else:
        _explain_one(args)
    return 0


def _explain_all(args: argparse.Namespace) -> None:
    from rich.console import Console

    from legato.cli.explain_all import tables
    from legato.cli.table import print_table
    from legato.observe.traces.attribution import read_waits

    with Console(stderr=True).status("reading the trace"):
        waits = list(read_waits(args.trace))
    for table in tables(waits, "longest" if args.by == "gap" else "first", args.most):
        print_table(table)


def _explain_one(args: argparse.Namespace) -> None:
    from legato.observe.traces.attribution import Attribution
    from legato.observe.traces.request_story import read_story

    story = read_story(args.trace, args.request_id, args.choice)
    attribution = Attribution(story)
    for line in explanation(story, attribution, args.gaps):
        print(line)
    if attribution.told_s and args.gaps:
        for line in _counterfactuals(args.trace, story.request_id, attribution):
            print(line)


def _counterfactuals(path: Path, request_id: str, attribution: "Attribution") -> list[str]:
    """Say what would have shortened the longest gap; the TTFT if there is no gap."""
    from legato.engine.replay.counterfactuals import counterfactuals
    from legato.engine.replay.replay import Token

    gaps, came_s = attribution.gaps(), attribution.came_s
    index = max(range(len(gaps)), key=gaps.__getitem__, default=None)
    if index is None:
        begins_s = attribution.begins_s
        token, before_s = 0, came_s[0] if begins_s is None else begins_s
    else:
        token, before_s = attribution.firsts[index + 1], came_s[attribution.firsts[index]]
    logging.disable(logging.WARNING)  # a replay's engine may warn of promises
    try:
        told = counterfactuals(path, Token(request_id, token), before_s, came_s[token])
    except ValueError as error:
        return ["", f"Its steps are not replayed: {error}."]
    finally:
        logging.disable(logging.NOTSET)
    what = "its first token" if index is None else f"token {token}, after the longest gap"
    return ["", *counterfactual_lines(told, what)]


def counterfactual_lines(told: "Explained", what: str) -> list[str]:
    """Return counterfactuals in words. Args: what: the token."""
    lines = [f"What would have changed the wait for {what}, by replays of {told.num_steps} steps:"]
    lines += [f"  {_otherwise(one)}" for one in told.found]
    if not told.found and not told.num_open:
        lines.append("  nothing that can be taken out: no other prompt was in its steps")
    if told.interrupted_s:
        lines.append(f"  the machine took {1e3 * told.interrupted_s:.0f} ms away in its steps")
    if told.num_agreeing < told.num_steps:
        lines.append(
            f"  in doubt: a replay of all plans {told.num_agreeing} of {told.num_steps} steps as "
            "recorded"
        )
    if told.num_open:
        lines.append(f"  no result for {told.num_open} more within {told.num_replayed} steps")
    return lines


def _otherwise(one: "Counterfactual") -> str:
    parts = [f"{1e3 * abs(one.change_s):.0f} ms {'earlier' if one.change_s >= 0.0 else 'later'}"]
    if one.is_on_time:
        parts.append("on time" if one.num_late else "nobody late")
    time = f"{100.0 * one.forecast_share:.0f} % of its steps' times are forecasts"
    return f"{one.without}: {', '.join(parts)} ({time})"


def explanation(story: "RequestStory", attribution: "Attribution", num_gaps: int) -> list[str]:
    """Return the explanation, in lines; it covers at most `num_gaps` gaps."""
    lines = [
        _title(story),
        *_caveats(story),
        *_grammar(story),
        *_fetched(story),
        *_short_hits(story),
        *_chunks(story),
        *_drafts(story),
        "",
    ]
    first = attribution.first_token()
    if first is None:
        lines.append("The way to its first token is not in the trace.")
    else:
        lines += _span("Time to first token", first)
    gaps = attribution.gaps()
    if gaps:
        lines += ["", _pace(attribution, gaps)]
    longest = sorted(range(len(gaps)), key=lambda index: -gaps[index])[:num_gaps]
    for index in longest:
        span = attribution.gap(index)
        num_tokens = attribution.firsts[index + 1]
        after_s = span.start_s - attribution.told_s[0]
        lines += [
            "",
            *_span(f"Token {num_tokens} to the next, {after_s:.3f} s after the first", span),
        ]
    return lines


def _title(story: "RequestStory") -> str:
    words = [f"Request {story.request_id}"]
    if story.arrived is not None:
        arrived = story.arrived
        words.append(f"{arrived.num_prompt_tokens} prompt tokens, class {arrived.slo_class}")
    if story.ended is not None:
        ended = story.ended
        words.append(f"{ended.num_output_tokens} tokens came, {ended.num_cached_tokens} cached")
        reason = story.answer and story.answer.finish_reasons.get(story.choice)
        words.append(f"ended: {reason or ended.finish_reason}")
        if ended.error is not None:
            words.append(ended.error)
    return "; ".join(words)


def _caveats(story: "RequestStory") -> list[str]:
    lines = []
    if any(story.replica_ids):
        lines.append(f"It was sent to replica {', then to '.join(story.replica_ids)}.")
    if story.arrived is None:
        lines.append("It came before the trace began.")
    if story.ended is None:
        lines.append("It had not ended when the trace did.")
    if story.answer is None:
        lines.append("Its answer is not in the trace: times are the engine's, without HTTP.")
    elif not story.answer.is_streamed:
        lines.append("It was not streamed: its client had nothing before the end.")
    if story.num_dropped:
        lines.append(f"{story.num_dropped} records are missing: writing could not keep up.")
    return lines


def _grammar(story: "RequestStory") -> list[str]:
    grammar, arrived = story.grammar, story.arrived
    if grammar is None or arrived is None:
        return []
    waited_s = grammar.ready_s - arrived.taken_s
    return [f"It waited {waited_s:.4f} s for its grammar, {grammar.compile_s:.4f} s to compile it"]


def _fetched(story: "RequestStory") -> list[str]:
    fetched = story.fetched
    if fetched is None:
        return []
    told = f"{fetched.num_tokens} of {fetched.num_wanted_tokens} tokens came from another engine"
    return [f"{told}, in {fetched.ended_s - fetched.begun_s:.4f} s"]


def _short_hits(story: "RequestStory") -> list[str]:
    """Say why cached tokens were computed again, for each time that the request was admitted."""
    hits = [step.record.short_hits.get(story.request_id) for step in story.steps]
    return [
        f"The blocks of its first {hit.num_matched_tokens} tokens were cached, but after token "
        f"{hit.num_tokens} {_LACKS[hit.lacks]}: "
        f"{hit.num_matched_tokens - hit.num_tokens} of these tokens were computed again"
        for hit in hits
        if hit is not None
    ]


def _chunks(story: "RequestStory") -> list[str]:
    prefill = [chunk for _, chunk in story.own_chunks() if chunk.kind == "prefill"]
    if not prefill:
        return []
    ends = Counter(chunk.ended_by for chunk in prefill if chunk.ended_by is not None)
    told = ", ".join(f"{count} {_ENDS[reason]}" for reason, count in ends.most_common())
    num_preemptions = sum(story.request_id in step.record.preempted for step in story.steps)
    again = f"; preempted {num_preemptions} times" if num_preemptions else ""
    num_tokens = sum(chunk.num_tokens for chunk in prefill)
    num_dropped = sum(chunk.num_dropped for chunk in prefill)
    dropped = f"; {num_dropped} rows dropped and computed again" if num_dropped else ""
    return [f"{num_tokens} tokens computed in {len(prefill)} chunks: {told}{again}{dropped}"]


def _drafts(story: "RequestStory") -> list[str]:
    from legato.observe.traces.drafted import drafted

    told = drafted(story)
    if not told.num_drafts:
        return []
    by_drafter = "; ".join(
        f"{told.num_accepted[name]} of {count} by {_DRAFTERS[name]}"
        for name, count in told.num_drafts.most_common()
    )
    return [
        f"{told.num_drafts.total()} drafts, {told.num_accepted.total()} of them right "
        f"({by_drafter}): {told.tokens_a_step:.2f} tokens a step as a stream"
    ]


def _pace(attribution: "Attribution", gaps: "list[float]") -> str:
    """Gaps and the time per token apart: with drafts, a gap may bring several tokens."""
    told_s, firsts = attribution.told_s, attribution.firsts
    num_tokens = firsts[-1] - firsts[0]
    middle_s = sorted(gaps)[(len(gaps) - 1) // 2]
    return (
        f"{len(gaps)} gaps: median {middle_s:.4f} s, longest {max(gaps):.4f} s; "
        f"time per token {(told_s[firsts[-1]] - told_s[firsts[0]]) / num_tokens:.4f} s"
    )


def _span(title: str, span: "Span") -> list[str]:
    lines = [f"{title}: {span.seconds:.4f} s"]
    for cause, seconds in sorted(span.parts.items(), key=lambda part: -part[1]):
        share = seconds / span.seconds if span.seconds else 0.0
        lines.append(f"  {seconds:9.4f} s {share:6.1%}  {_WORDS[cause]}{_whose(cause, span)}")
    if span.drafts_ended_by:
        told = span.drafts_ended_by.most_common()
        ends = "; ".join(f"{_DRAFTS_END[reason]} ({count})" for reason, count in told)
        lines.append(f"  why its steps held no more drafts: {ends}")
    return lines


def _whose(cause: "Cause", span: "Span") -> str:
    if cause == "others_prefill":
        whose, unit = span.others, "tokens"
    elif cause == "others_drafts":
        whose, unit = span.others_drafts, "drafts"
    else:
        return ""
    [(request_id, count)] = whose.most_common(1)
    others = f" and {len(whose) - 1} more" if len(whose) > 1 else ""
    return f": {request_id} ({count} {unit}){others}"
