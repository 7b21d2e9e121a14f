"""Are random JSON schemas met, and what does structured output cost the streams beside it?

    python -m benchmarks structured schemas [COUNT]
    python -m benchmarks structured itl [SECONDS] [--rounds 4]

The first exits with status 1 where an output is invalid.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import jsonschema_rs
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from benchmarks.runner.flags import add_rounds
from benchmarks.runner.main import main
from benchmarks.runner.rounds import turns
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, running_server
from legato import AsyncLLM, SamplingParams, StructuredOutputs
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.core.errors import InvalidRequestError
from legato.engine.errors import RequestFailedError
from legato.language.completion import Completion
from legato.language.forms.check import GrammarChecker
from legato.language.tokenizer.tokenizer import load_tokenizer

MINUTES = 20

_MAX_TOKENS = 700
_NUM_STREAMS = 32
_FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "items": {"type": "array", "items": {"type": "string"}, "minItems": 200},
    },
    "required": ["name", "items"],
    "additionalProperties": False,
}
"""For streams that are to go on: no output reaches two hundred items."""

_NAMES = st.text("abcdefghij_é ", min_size=1, max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_NAMES, inner, max_size=2),
    max_leaves=3,
)


def _range(low: str, high: str, numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """None, one or both of two bounds."""
    return st.tuples(numbers, numbers, st.booleans(), st.booleans()).map(
        lambda drawn: (
            ({low: min(drawn[:2])} if drawn[2] else {})
            | ({high: max(drawn[:2])} if drawn[3] else {})
        )
    )


def _of_type(name: str, *parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Any]:
    joined = st.tuples(*parts).map(lambda drawn: {k: v for d in drawn for k, v in d.items()})
    return joined.map(lambda keywords: {"type": name, **keywords})


_STRINGS = st.one_of(
    _of_type("string", _range("minLength", "maxLength", st.integers(0, 12))),
    st.sampled_from(["^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "ab?c", "^(yes|no)+$", "[^a]$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 20}
    ),
    st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(
        lambda name: {"type": "string", "format": name}
    ),
)
_LEAVES = st.one_of(
    _STRINGS,
    _of_type("integer", _range("minimum", "maximum", st.integers(-10_000, 10_000))),
    _of_type("number", _range("minimum", "maximum", st.integers(-1000, 1000))),
    st.integers(1, 60).map(
        lambda n: {"type": "integer", "multipleOf": n, "minimum": 0, "maximum": 99}
    ),
    st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"], "maximum": 9}]
    ),
    st.lists(_VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    _VALUES.map(lambda value: {"const": value}),
)


def _arrays(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tuples = st.lists(items, min_size=1, max_size=3).map(
        lambda parts: {"prefixItems": parts, "items": False, "minItems": len(parts)}
    )
    lists = st.tuples(items, _range("minItems", "maxItems", st.integers(0, 3))).map(
        lambda drawn: {"items": drawn[0], "maxItems": 4, **drawn[1]}
    )
    return (tuples | lists).map(lambda keywords: {"type": "array", **keywords})


@st.composite
def _objects(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(_NAMES, values, max_size=4))
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(name for name in properties if draw(st.booleans())),
        "additionalProperties": draw(st.just(False) | st.just(False) | values),
        **({"maxProperties": 6} if draw(st.booleans()) else {}),
    }


def _combined(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(parts, min_size=1, max_size=3)
    return st.one_of(
        several.map(lambda found: {"anyOf": found}),
        several.map(lambda found: {"oneOf": found}),
        st.lists(parts, min_size=1, max_size=2).map(lambda found: {"allOf": found}),
        parts.map(lambda part: {"$ref": "#/$defs/part", "$defs": {"part": part}}),
    )


SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: _arrays(inner) | _objects(inner) | _objects(inner) | _combined(inner),
    max_leaves=6,
)


def _drawn(count: int) -> list[Any]:
    schemas: list[Any] = []

    @seed(1)
    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(SCHEMAS)
    def draw(schema: Any) -> None:
        schemas.append(schema)

    draw()
    return _with_definitions_on_top(schemas)


def _with_definitions_on_top(schemas: list[Any]) -> list[Any]:
    """A definition is found from the root: each gets a name of its own there."""
    numbers = itertools.count()

    def hoisted(value: Any, definitions: dict[str, Any]) -> Any:
        if isinstance(value, list):
            return [hoisted(part, definitions) for part in value]
        if not isinstance(value, dict):
            return value
        if value.get("$ref") == "#/$defs/part":
            name = f"part{next(numbers)}"
            definitions[name] = hoisted(value["$defs"]["part"], definitions)
            return {"$ref": f"#/$defs/{name}"}
        return {key: hoisted(part, definitions) for key, part in value.items()}

    out = []
    for schema in schemas:
        definitions: dict[str, Any] = {}
        top = hoisted(schema, definitions)
        out.append({**top, "$defs": definitions} if definitions else top)
    return out


def _schemas(run: Run, count: int) -> int:
    """Have each of so many schemas met at temperature 1.3; returns how many outputs are invalid."""
    vocabulary = load_tokenizer(resolve_source(DEFAULT_MODEL)).vocabulary
    checker = GrammarChecker(lambda: vocabulary)
    refused: Counter[str] = Counter()
    drawn, taken = _drawn(count), []
    for number, schema in enumerate(drawn):
        form = StructuredOutputs(json=schema)
        try:
            checker.resolve(form)
        except InvalidRequestError as error:
            refused[str(error).split(", at #")[0].rpartition("cannot be met: ")[2][:80]] += 1
        else:
            params = SamplingParams(
                structured_outputs=form, temperature=1.3, seed=number, max_tokens=_MAX_TOKENS
            )
            taken.append((schema, params))
    told: Counter[str] = Counter()
    invalid: list[tuple[Any, str]] = []
    with run.status("answering") as status:
        answers = asyncio.run(_answers(taken, status.update))
    for (schema, _), answer in zip(taken, answers, strict=True):
        if isinstance(answer, RequestFailedError):
            told[f"failed ({str(answer).splitlines()[0]})"] += 1
            continue
        told[str(answer.finish_reason)] += 1
        if answer.finish_reason == "stop" and not _is_valid(schema, answer.text):
            invalid.append((schema, answer.text))
    print(f"{len(drawn)} schemas: {dict(told)}, {len(invalid)} invalid; refused:")
    for reason, number in refused.most_common():
        print(f"{number:5} {reason}")
    for schema, text in invalid[:20]:
        print(f"\n{json.dumps(schema)}\n{text}")
    run.write({"num_schemas": len(drawn), "ends": told, "refused": refused, "invalid": invalid})
    return len(invalid)


async def _answers(
    asked: Sequence[tuple[Any, SamplingParams]], tell: Callable[[str], None]
) -> list[Completion | RequestFailedError]:
    """To each schema, as many at once as the engine runs."""
    room = asyncio.Semaphore(2 * _NUM_STREAMS)
    num_left = len(asked)
    async with AsyncLLM(max_num_seqs=_NUM_STREAMS) as llm:

        async def answer(schema: Any, params: SamplingParams) -> Completion | RequestFailedError:
            nonlocal num_left
            async with room:
                try:
                    prompt = f"JSON by this schema: {json.dumps(schema)}\n"
                    [*_, last] = [part async for part in llm.generate(prompt, params)]
                except RequestFailedError as error:
                    return error
                finally:
                    num_left -= 1
                    tell(f"{num_left} of {len(asked)} left to answer")
                return last.outputs[0]

        return await asyncio.gather(*itertools.starmap(answer, asked))


def _is_valid(schema: Any, text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    valid: bool = validator.is_valid(value)
    return valid


class _Stream(threading.Thread):
    """Reads one stream until it is told to stop, and keeps its gaps in seconds."""

    def __init__(self, url: str, fields: dict[str, Any], stopping: threading.Event) -> None:
        super().__init__(daemon=True)
        self.gaps_s: list[float] = []
        self._url, self._fields, self._stopping = url, fields, stopping

    def run(self) -> None:
        with httpx.Client(timeout=None) as http:
            while not self._stopping.is_set():
                self._read(http)

    def _read(self, http: httpx.Client) -> None:
        body = {
            "max_tokens": 400,
            "stream": True,
            "temperature": 1.0,
            "ignore_eos": True,
            **self._fields,
        }
        last_s: float | None = None
        with http.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if self._stopping.is_set():
                    return
                if line.startswith("data: {"):
                    now_s = time.monotonic()
                    if last_s is not None:
                        self.gaps_s.append(now_s - last_s)
                    last_s = now_s


def _round(url: str, num_constrained: int, seconds: float) -> list[float]:
    """Gaps of the free streams, where so many of all are constrained."""
    stopping = threading.Event()
    form = {"structured_outputs": {"json": _FORM}}
    streams = [
        _Stream(url, {"prompt": f"Story {i}:", **(form if i < num_constrained else {})}, stopping)
        for i in range(2 * _NUM_STREAMS)
    ]
    for stream in streams:
        stream.start()
    time.sleep(2.0)
    for stream in streams:
        stream.gaps_s.clear()
    time.sleep(seconds)
    gaps_s = [gap for stream in streams[_NUM_STREAMS:] for gap in stream.gaps_s]
    stopping.set()
    for stream in streams:
        stream.join(30)
    return gaps_s


def _itl(run: Run, seconds: float) -> None:
    """ITL of 32 free streams beside 32 others, free and constrained in turn, on a real server."""
    medians_s: dict[int, list[float]] = {0: [], _NUM_STREAMS: []}
    with running_server(f"{SERVE} --max-num-seqs 64") as url:
        _round(url, _NUM_STREAMS, 1.0)
        for number, num_constrained in turns(list(medians_s), run.flags.rounds):
            median_s = statistics.median(_round(url, num_constrained, seconds))
            medians_s[num_constrained].append(median_s)
            beside = "constrained" if num_constrained else "free"
            run.tell(f"round {number + 1}: {1e3 * median_s:.1f} ms beside {beside} streams")
    ratios = [own / free for own, free in zip(*reversed(medians_s.values()), strict=True)]
    print(f"median ITL beside constrained streams, to that beside free ones: {ratios}")
    print(f"median of the ratios: {statistics.median(ratios):.3f}x")
    run.write({"free_s": medians_s[0], "constrained_s": medians_s[_NUM_STREAMS]})


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=("schemas", "itl"))
    parser.add_argument("size", type=float, nargs="?", help="schemas (1000), or seconds (10)")
    add_rounds(parser, 4, help="of `itl`")


def measure(run: Run) -> int:
    if run.flags.part == "itl":
        _itl(run, run.flags.size or 10.0)
        return 0
    return min(1, _schemas(run, round(run.flags.size or 1000)))


if __name__ == "__main__":
    main("structured")
