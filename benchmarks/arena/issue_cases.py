"""The cases A.1 to A.12 of issue 58, with its settings, and the figures that it quotes."""

from typing import Any

from benchmarks.arena.case import Case, Pause, Shape, Source
from benchmarks.arena.shapes import alone_s
from legato.core.slo import BATCH
from legato.scheduler.step_costs import StepCosts

_ROWS = (0.0002,) * 5
_COSTS = StepCosts(step_s=0.010, row_s=_ROWS)
_DEEP = StepCosts(step_s=0.060, row_s=(0.0003,) * 5, decode_context_s=1.1e-6)
_WIDE = StepCosts(step_s=0.010, row_s=_ROWS, decode_context_s=1e-5)
_MANY = StepCosts(step_s=0.010, row_s=_ROWS, decode_row_s=0.001)
_SLOW = StepCosts(step_s=0.030, row_s=_ROWS)


def issue_cases() -> list[Case]:
    """Return all cases, by number."""
    groups = (_growing(), _best_effort(), _stopped(), _refused(), _late(), _starved())
    return sorted(
        (case for group in groups for case in group),
        key=lambda case: int(case.name.split()[0].removeprefix("a")),
    )


def _growing() -> list[Case]:
    quote = "kept {s.kept} of {s.num}, late {s.late} of {s.gaps}"

    def growing(name: str, num: int, num_out: int, issue: str) -> Case:
        return Case(
            name=name,
            shape=_shape(_DEEP, 16_000, 12_000),
            settings={"max_num_batched_tokens": 2048, "max_num_seqs": 64, "itl_slo_s": 0.1},
            sources=[Source(name="s", num_prompt_tokens=100, num_output_tokens=num_out, count=num)],
            until="s",
            seconds=3600.0,
            issue=issue,
            quote=quote,
        )

    return [
        growing("a1 20 x 2,500", 20, 2500, "kept 0 of 20, late 24360 of 49980"),
        growing("a1 40 x 1,000", 40, 1000, "kept 0 of 40"),
    ]


def _best_effort() -> list[Case]:
    stream = Source(name="s", num_prompt_tokens=10, num_output_tokens=300, start_s=7.0)
    deep = Source(name="b", num_prompt_tokens=15_000, num_output_tokens=600, slo_class=BATCH)
    # Promised prompts come in short chunks, and every tenth chunk is a best-effort one.
    queue = Source(
        name="b", num_prompt_tokens=6000, num_output_tokens=2, slo_class=BATCH, num_clients=8
    )
    prompts = Source(
        name="s", num_prompt_tokens=150, num_output_tokens=2, every_s=0.038, count=2632
    )
    paced = {"max_num_batched_tokens": 2048, "max_num_seqs": 16, "itl_slo_s": 0.1}
    other = {"other": {"itl_s": 1.0}}
    return [
        Case(
            name="a2",
            shape=_shape(_WIDE, 30_000, 2000),
            settings=paced,
            sources=[deep, stream],
            until="s",
            seconds=200.0,
            issue="late 299 of 299",
            quote="late {s.late} of {s.gaps}, best-effort tokens {b.tokens}",
        ),
        *[
            Case(
                name=name,
                shape=_shape(_COSTS, 16_000, 8000),
                settings={
                    "max_num_batched_tokens": 2048,
                    "max_num_seqs": 32,
                    "itl_slo_s": 0.2,
                    "ttft_slo_s": 2.0,
                    "shed_load": name == "a3 shed",
                },
                sources=[prompts] if name == "a3 alone" else [queue, prompts],
                until="s",
                seconds=130.0,
                issue=issue,
                quote="late {s.missed} of {s.num}, refused {s.num_refused}, best effort "
                "{run.best_effort_prefill:.0%} of prefill",
            )
            for name, issue in (
                ("a3", "late 1709 of 2632, 49 % of prefill"),
                ("a3 shed", "late 1030 of 1456"),
                ("a3 alone", "without the queue"),
            )
        ],
        Case(
            name="a4",
            shape=_shape(_COSTS, 4096, 2000),
            settings={
                "max_num_batched_tokens": 256,
                "max_num_seqs": 32,
                "itl_slo_s": 0.2,
                "ttft_slo_s": 2.0,
                "slo_classes": other,
                "shed_load": True,
            },
            sources=[
                Source(
                    name="flood",
                    num_prompt_tokens=400,
                    num_output_tokens=4,
                    every_s=0.05,
                    count=4000,
                ),
                Source(
                    name="other",
                    num_prompt_tokens=50,
                    num_output_tokens=4,
                    slo_class="other",
                    every_s=2.0,
                    count=99,
                    start_s=1.0,
                ),
            ],
            seconds=200.0,
            issue="0 of 99 first tokens in 200 s",
            quote="{other.first} of {other.num} first tokens in {run.seconds:.0f} s, longest wait "
            "{other.longest_s:.1f} s",
        ),
    ]


def _stopped() -> list[Case]:
    server = {"max_num_batched_tokens": 2048, "ttft_slo_s": 5.0, "admission_optimism": 0.5}
    big = Source(name="big", num_prompt_tokens=29_000, num_output_tokens=3, tenant="A", start_s=0.5)
    return [
        Case(
            name="a5 tenants",
            shape=_shape(_COSTS, 32_000, 1000),
            settings={**server, "max_num_seqs": 32},
            sources=[
                Source(
                    name="s", num_prompt_tokens=600, num_output_tokens=3000, tenant="B", count=6
                ),
                big,
                Source(
                    name="c",
                    num_prompt_tokens=50,
                    num_output_tokens=3,
                    tenant="C",
                    start_s=0.6,
                    every_s=0.12,
                    count=10,
                ),
            ],
            until="c",
            seconds=300.0,
            issue="another tenant waits 34 s, 880 of 1000 blocks free",
            quote="waits {c.longest_s:.1f} s, {run.num_free_blocks} of 1000 blocks free",
        ),
        Case(
            name="a5 yields",
            shape=_shape(_COSTS, 32_000, 1000),
            settings={**server, "max_num_seqs": 64},
            sources=[
                Source(name="s", num_prompt_tokens=600, num_output_tokens=1500, count=6),
                Source(
                    name="b",
                    num_prompt_tokens=40,
                    num_output_tokens=3000,
                    slo_class=BATCH,
                    count=20,
                ),
                Source(name="big", num_prompt_tokens=29_500, num_output_tokens=3, start_s=1.0),
            ],
            seconds=17.0,
            issue="19990 tokens become 190, 688 blocks idle",
            quote="{b.tokens} tokens of best-effort streams, preempted {b.preempted}, "
            "{run.num_free_blocks} blocks free",
        ),
        Case(
            name="a6",
            shape=_shape(_COSTS, 16_000, 400),
            settings={**server, "max_num_seqs": 3},
            sources=[
                *[
                    Source(
                        name=f"b{i}",
                        num_prompt_tokens=200,
                        num_output_tokens=6000,
                        slo_class=BATCH,
                        start_s=0.1 * i,
                    )
                    for i in range(3)
                ],
                Source(
                    name="x",
                    num_prompt_tokens=20,
                    num_output_tokens=20,
                    every_s=2.0,
                    start_s=2.0,
                    count=14,
                ),
            ],
            until="x",
            seconds=150.0,
            issue="TTFT 63.5 s instead of 0.02",
            quote="TTFT longest {x.longest_s:.2f} s, median {x.median_s:.2f} s",
        ),
        Case(
            name="a7",
            shape=_shape(_COSTS, 4096, 2000),
            settings={
                "max_num_batched_tokens": 256,
                "max_num_seqs": 4,
                "max_waiting": 64,
                "itl_slo_s": 0.2,
                "ttft_slo_s": 5.0,
                "shed_load": True,
            },
            sources=[
                Source(
                    name="r",
                    num_prompt_tokens=20,
                    num_output_tokens=500,
                    slo_class=BATCH,
                    count=4,
                ),
                Source(
                    name="b",
                    num_prompt_tokens=20,
                    num_output_tokens=500,
                    slo_class=BATCH,
                    count=64,
                    start_s=0.3,
                ),
                Source(name="x", num_prompt_tokens=20, num_output_tokens=3, start_s=0.5),
            ],
            until="x",
            seconds=30.0,
            issue="429 for the promised request",
            quote="refused {x.num_refused} of {x.num}, longest wait {x.longest_s:.2f} s",
        ),
    ]


def _late() -> list[Case]:
    """Cases 8 and 10."""
    paced = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "itl_slo_s": 0.1}

    def queue(num: int, num_after: int, pause_s: float) -> list[Source]:
        after = Source(
            name="n",
            num_prompt_tokens=1500,
            num_output_tokens=2,
            start_s=2.0 + pause_s,
            every_s=0.55,
            count=num_after,
        )
        return [
            Source(name="s", num_prompt_tokens=10, num_output_tokens=1500, count=20),
            Source(name="w", num_prompt_tokens=1500, num_output_tokens=2, start_s=2.0, count=num),
            after,
        ]

    quote = "TTFT of those that waited up to {w.longest_s:.1f} s, missed "
    quote += "{w.missed} of {w.num} and {n.missed} of {n.num} after them"
    return [
        *[
            Case(
                name=f"a8 hiccup {1000 * seconds:.0f} ms",
                shape=_shape(_MANY, 4096, 8000),
                settings={**paced, "ttft_slo_s": 4.0},
                sources=queue(3, 14, seconds),
                pauses=[Pause(at_s=2.0, seconds=seconds)],
                seconds=16.0,
                issue="TTFT 1.6 to 4.9 s of a promise of 4" if seconds else "undisturbed",
                quote=quote,
            )
            for seconds in (0.0, 0.06, 0.09)
        ],
        *[
            Case(
                name=f"a8 pause {seconds:g} s",
                shape=_shape(_MANY, 4096, 8000),
                settings={**paced, "ttft_slo_s": 15.0},
                sources=queue(6, 50, seconds),
                pauses=[Pause(at_s=2.0, seconds=seconds, in_step=True)] if seconds else [],
                seconds=47.0,
                issue="TTFT 3.9 to 12 s" if seconds else "undisturbed",
                quote=quote,
            )
            for seconds in (0.0, 1.0, 5.0)
        ],
        Case(
            name="a8 limit 0",
            shape=_shape(_COSTS, 4096, 4000),
            settings={**paced, "max_num_seqs": 8, "ttft_slo_s": 4.0},
            sources=[
                Source(name="s", num_prompt_tokens=10, num_output_tokens=1500),
                Source(name="w", num_prompt_tokens=1500, num_output_tokens=2, start_s=1.0),
            ],
            pauses=[Pause(at_s=1.0, seconds=None)],
            seconds=10.0,
            issue="ZeroDivisionError",
            quote="first token after {w.longest_s:.2f} s",
        ),
        *[
            Case(
                name=f"a10{'' if stale_s else ' fresh'}",
                shape=_shape(_SLOW, 4000, 130),
                settings={
                    "max_num_batched_tokens": 512,
                    "max_num_seqs": 16,
                    "ttft_slo_s": 5.0,
                    "admission_optimism": 0.0,
                },
                sources=[
                    Source(
                        name="b", num_prompt_tokens=2500, num_output_tokens=500, slo_class=BATCH
                    ),
                    Source(name="l", num_prompt_tokens=1500, num_output_tokens=1400, start_s=1.0),
                    Source(
                        name="i",
                        num_prompt_tokens=30,
                        num_output_tokens=3,
                        start_s=1.5,
                        every_s=0.5,
                        count=68,
                    ),
                ],
                until="i",
                stale_s=stale_s,
                seconds=120.0,
                issue="late 62 of 68" if stale_s else "none late",
                quote="late {i.missed} of {i.num}, longest {i.longest_s:.1f} s",
            )
            for stale_s in (None, 5170.0)
        ],
    ]


def _refused() -> list[Case]:
    def asked(name: str, max_tokens: int, issue: str, **settings: Any) -> Case:
        return Case(
            name=name,
            shape=_shape(_COSTS, 131_072, 200_000),
            settings={
                "max_num_batched_tokens": 2048,
                "max_num_seqs": 8,
                "itl_slo_s": 0.2,
                "ttft_slo_s": 3.0,
                **settings,
            },
            sources=[
                Source(
                    name="r",
                    num_prompt_tokens=50,
                    num_output_tokens=60,
                    max_tokens=max_tokens,
                    every_s=0.085,
                    count=295,
                )
            ],
            seconds=25.0,
            issue=issue,
            quote="refused {r.num_refused} of {r.num}, Retry-After {r.retry_least_s:.0f} to "
            "{r.retry_most_s:.0f} s, truth {run.retries.true_s:.1f}, in time {r.in_time}",
        )

    longest = 131_000
    return [
        asked("a9 shed 60", 60, "11 refusals are right", max_waiting=1000, shed_load=True),
        asked("a9 shed", longest, "needless: 58 of 295", max_waiting=1000, shed_load=True),
        asked("a9 queue 60", 60, "with max_tokens set", max_waiting=16),
        asked("a9 queue", longest, "Retry-After 1500 s", max_waiting=16),
    ]


def _starved() -> list[Case]:
    def flooded(itl_s: float, issue: str) -> Case:
        return Case(
            name=f"a11 {1000 * itl_s:.0f} ms",
            shape=_shape(_RISING, 8192, 8000),
            settings={"itl_slo_s": itl_s},
            sources=[
                Source(
                    name="a", num_prompt_tokens=50, num_output_tokens=3000, tenant="a", count=40
                ),
                Source(name="b", num_prompt_tokens=1, num_output_tokens=1, tenant="b", start_s=2.0),
            ],
            until="b",
            seconds=32.0,
            issue=issue,
            quote="{b.first} of {b.num} first tokens, after {b.longest_s:.1f} s; of the flood "
            "{a.first} of {a.num}, still {a.still_s:.1f} s",
        )

    # Five times alone plus half a second, and 1.25 times alone.
    most_short_s = 5.0 * alone_s(_PREFILL, 101, 512, 0.0) + 0.5
    most_long_s = 1.25 * alone_s(_PREFILL, 7000, 512, 0.0)

    def behind(name: str, issue: str, **settings: Any) -> Case:
        return Case(
            name=name,
            shape=_shape(_PREFILL, 8192, 4000),
            settings=settings,
            sources=[
                Source(name="long", num_prompt_tokens=7000, num_output_tokens=10),
                Source(name="short", num_prompt_tokens=101, num_output_tokens=10, start_s=1.0),
            ],
            seconds=60.0,
            issue=f"{issue}; wanted {most_short_s:.1f} and {most_long_s:.1f}",
            quote="short {short.longest_s:.1f} s, long {long.longest_s:.1f} s",
        )

    return [
        flooded(0.020, "nothing after 30 s"),
        *[flooded(itl_s, "the same") for itl_s in (0.009, 0.013, 0.016)],
        behind("a12", "short 19 to 20 s, long 21 s"),
        behind("a12 itl", "short 19 to 20 s", itl_slo_s=0.1),
        behind("a12 ttft", "short 0.4 to 0.9 s, long 24 s", ttft_slo_s=2.0),
    ]


_RISING = StepCosts(
    step_s=0.0093, row_s=_ROWS, decode_row_s=0.0004, decode_context_s=0.3e-6, chunk_s=0.001
)
"""A machine on which a step of one stream takes 10 ms."""

_PREFILL = StepCosts(
    step_s=0.020,
    row_s=(0.0018,) * 5,
    decode_row_s=0.001,
    decode_context_s=4e-6,
    chunk_s=5e-3,
    area_s=0.26e-6,
    context_s=5e-6,
)
"""A machine on which 7,000 tokens take 20 s alone, and 101 take 0.2 s."""


def _shape(costs: StepCosts, max_model_len: int, num_blocks: int) -> Shape:
    """Return a machine whose steps last as believed. Args: num_blocks: of 32 tokens."""
    return Shape(
        name="",
        costs=costs,
        max_model_len=max_model_len,
        kv_cache_tokens=32 * num_blocks,
        truth_error=0.0,
        noise=0.0,
        turnaround_s=0.0,
    )
