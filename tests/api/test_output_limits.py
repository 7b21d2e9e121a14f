"""Limits of the output: of requests that name none, and the most that a request gets."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from legato.api.bodies.body_model import Kind, Serving
from legato.api.job import Job, Piece, Warned
from legato.api.reading.request_reader import RequestReader
from legato.checkpoint.defaults import ModelDefaults
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL, SchedulerConfig
from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import SamplingParams
from legato.core.stats import CacheInfo
from legato.engine.process.engine_messages import EngineInfo
from legato.language.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.api import chat_templates

MAX_MODEL_LEN = 256
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[Kind, tuple[dict[str, Any], str]] = {
    "chat": ({"messages": MESSAGES}, "max_completion_tokens"),
    "completions": ({"prompt": "Hi"}, "max_tokens"),
    "responses": ({"input": "Hi", "store": False}, "max_output_tokens"),
    "messages": ({"messages": MESSAGES}, "max_tokens"),
    "generate": ({"token_ids": [5, 6]}, "sampling_params.max_tokens"),
}
"""Value a body, and the path of its limit."""
MayBeOpen = pytest.mark.parametrize("kind", [kind for kind in BODIES if kind != "messages"])
EveryKind = pytest.mark.parametrize("kind", BODIES)

Reader = Callable[..., RequestReader]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_source(DEFAULT_MODEL))


@pytest.fixture
def reader_of(tokenizer: Tokenizer) -> Reader:
    def make(
        default: int | None = None,
        most: int | None = None,
        of_model: int | None = None,
        own_tokenizer: Tokenizer | None = None,
        **sampling: Any,
    ) -> RequestReader:
        info = EngineInfo(
            model="m",
            served_model_names=("m",),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=tokenizer.backend.get_vocab_size(),
            cache=CacheInfo(
                num_blocks=9, block_size=32, dtype="bfloat16", enable_prefix_caching=True
            ),
            scheduler=SchedulerConfig(),
            settings={},
            hidden_size=8,
        )
        serving = Serving(
            info=info,
            max_completions=8,
            default_max_tokens=default,
            max_output_tokens=most,
            trust_request_chat_template=False,
            message_special_tokens="text",
            unknown_fields="refuse",
        )
        defaults = ModelDefaults(eos_token_ids=(2,), sampling=sampling, max_tokens=of_model)
        return RequestReader(own_tokenizer or tokenizer, defaults, serving)

    return make


def read(
    reader: RequestReader, kind: Kind, asked: int | None = None, **more: Any
) -> tuple[int | None, list[str]]:
    """Return the `max_tokens` of a body's job, and the warnings."""
    body, path = BODIES[kind]
    body = {**body, **more}
    where, _, name = path.rpartition(".")
    if where:
        body[where] = {} if asked is None else {name: asked}
    elif asked is not None:
        body[name] = asked
    parts = list(reader.read(kind, msgspec.json.encode(body)))
    [job] = [part for part in parts if isinstance(part, Job)]
    return job.params.max_tokens, [part.text for part in parts if isinstance(part, Warned)]


@MayBeOpen
def test_a_request_without_a_limit_gets_the_default(reader_of: Reader, kind: Kind) -> None:
    assert read(reader_of(), kind) == (16 if kind == "completions" else None, [])
    assert read(reader_of(default=40), kind) == (40, [])
    assert read(reader_of(default=40), kind, 90) == (90, [])


@MayBeOpen
def test_the_models_own_default_comes_first(reader_of: Reader, kind: Kind) -> None:
    assert read(reader_of(of_model=70), kind) == (70, [])
    assert read(reader_of(default=40, of_model=70), kind) == (70, [])
    assert read(reader_of(most=50, of_model=70), kind) == (50, [])


@MayBeOpen
def test_a_default_fits_into_the_context(reader_of: Reader, kind: Kind) -> None:
    limit, warnings = read(reader_of(default=4000), kind)
    assert limit is not None
    assert MAX_MODEL_LEN - 60 < limit < MAX_MODEL_LEN
    assert warnings == []


@EveryKind
def test_no_request_gets_more_than_the_most(reader_of: Reader, kind: Kind) -> None:
    reader = reader_of(most=50)
    limit, warnings = read(reader, kind, 100_000)
    assert limit == 50
    name = BODIES[kind][1]
    assert warnings == [
        f"{name} is 100000, of which this server gives at most 50 (--max-output-tokens)"
    ]
    assert read(reader, kind, 50) == (50, [])


@pytest.mark.parametrize(
    ("kind", "body", "name"),
    [
        ("chat", {"messages": MESSAGES, "num_predict": 90}, "num_predict"),
        ("chat", {"messages": MESSAGES, "max_tokens": 90, "num_predict": -1}, "max_tokens"),
        *(
            ("ollama_generate", {"prompt": "Hi", "raw": is_raw, "options": {"num_predict": 90}},
             "options.num_predict")
            for is_raw in (False, True)
        ),
    ],
)  # fmt: skip
def test_the_warning_has_the_name_that_the_client_sent(
    reader_of: Reader, kind: Kind, body: dict[str, Any], name: str
) -> None:
    parts = reader_of(most=50).read(kind, msgspec.json.encode(body))
    [warned] = [part for part in parts if isinstance(part, Warned)]
    assert warned.param == name
    assert warned.text.startswith(f"{name} is 90, of which")


@MayBeOpen
def test_the_most_bounds_a_request_without_a_limit(reader_of: Reader, kind: Kind) -> None:
    own = 16 if kind == "completions" else 50
    assert read(reader_of(most=50), kind) == (own, [])
    assert read(reader_of(default=80, most=50), kind) == (50, [])


@MayBeOpen
def test_a_default_is_never_below_the_least_that_is_asked_for(
    reader_of: Reader, kind: Kind
) -> None:
    if kind == "generate":
        least = {"sampling_params": {"min_tokens": 60}}
        body = msgspec.json.encode({**BODIES[kind][0], **least})
        [job] = [p for p in reader_of(default=40).read(kind, body) if isinstance(p, Job)]
        assert job.params.max_tokens == 60
    else:
        assert read(reader_of(default=40), kind, min_tokens=60) == (60, [])
        assert read(reader_of(of_model=40), kind, min_tokens=60) == (60, [])
        assert read(reader_of(default=80), kind, min_tokens=60) == (80, [])


def test_the_least_beyond_the_most_is_refused(reader_of: Reader) -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens must be between 0 and max_tokens"):
        read(reader_of(most=50), "chat", 100, min_tokens=60)


def test_a_prompt_is_cut_to_leave_room_for_what_the_request_gets(reader_of: Reader) -> None:
    prompt = [5] * (MAX_MODEL_LEN + 10)
    reader = reader_of(most=50)
    body = {"prompt": prompt, "max_tokens": 900, "truncate_prompt_tokens": -1}
    parts = list(reader.read("completions", msgspec.json.encode(body)))
    [job] = [part for part in parts if isinstance(part, Job)]
    assert (len(job.prompts[0].token_ids), job.params.max_tokens) == (MAX_MODEL_LEN - 50, 50)


def test_a_penalty_over_no_tokens_is_none_of_the_models_either(reader_of: Reader) -> None:
    options = {"repeat_last_n": 0}
    reader = reader_of(repetition_penalty=1.3)
    for sent, penalty in (({}, 1.3), (options, 1), ({**options, "repeat_penalty": 2}, 1)):
        body = msgspec.json.encode({"messages": MESSAGES, "options": sent})
        [job] = [part for part in reader.read("ollama_chat", body) if isinstance(part, Job)]
        assert job.params.repetition_penalty == penalty


@pytest.mark.parametrize(("of_model", "default", "limit"), [(None, None, None), (9, 5, 9)])
def test_other_servers_endpoints_tell_the_defaults_by_their_own_names(
    reader_of: Reader, of_model: int | None, default: int | None, limit: int | None
) -> None:
    reader = reader_of(of_model=of_model, default=default, top_k=20, repetition_penalty=1.1)

    def answer(kind: Kind, body: bytes = b"") -> Any:
        *pieces, _end = reader.read(kind, body)
        return msgspec.json.decode(
            b"".join(part.data for part in pieces if isinstance(part, Piece))
        )

    params = answer("props")["default_generation_settings"]["params"]
    assert params == {"top_k": 20, "repeat_penalty": 1.1, "n_predict": limit or -1}
    lines = answer("ollama_show", b'{"model": "m"}')["parameters"].splitlines()
    limits = [] if limit is None else [f"num_predict {limit}"]
    assert lines == ["top_k 20", "repeat_penalty 1.1", *limits]


@pytest.mark.parametrize("budget", [5, MAX_MODEL_LEN, 2**64, 10**40])
def test_a_thinking_budget_is_at_most_the_context(reader_of: Reader, budget: int) -> None:
    thinking = load_tokenizer(resolve_source(DEFAULT_MODEL), chat_templates.QWEN)
    thinking.backend.add_special_tokens(["<think>", "</think>"])
    reader = reader_of(own_tokenizer=Tokenizer(thinking.pretrained))
    body = json.dumps({"messages": MESSAGES, "thinking_token_budget": budget}).encode()
    [job] = [part for part in reader.read("chat", body) if isinstance(part, Job)]
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(job.params), type=SamplingParams)
    assert sent.thinking_limit is not None
    assert sent.thinking_limit.budget == min(budget, MAX_MODEL_LEN)
