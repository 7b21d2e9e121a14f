"""Each documented field of a request changes what the server reads, or the reference says why not.

The tests are generated from the OpenAPI document: a new field has one, which fails until the field
has a value in `field_values.py`.
"""

import copy
from collections.abc import Container
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel
from scripts.api_reference.http_api import documented_fields
from tokenizers.processors import TemplateProcessing

from legato.api.bodies.body_model import Kind, RequestModel, Serving
from legato.api.http.errors import ApiError
from legato.api.job import Job, Warned, packed
from legato.api.reading.request_reader import RequestReader
from legato.api.responses.response_body import ResponseTerms
from legato.checkpoint.defaults import ModelDefaults
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL, SchedulerConfig
from legato.core.errors import InvalidRequestError
from legato.engine.process.channel import pack_frame
from legato.engine.process.engine_messages import CacheInfo, EngineInfo
from legato.language.tokenizer.tokenizer import load_tokenizer
from tests.api import chat_templates
from tests.api.field_values import BESIDE, PLACES, VALUES

FIELDS = documented_fields()
ONLY_FOR_RENDERING = ("request_id", "return_token_offsets")
CHECKED = (
    *("model", "best_of", "thread", "detokenize", "num_ctx"),
    "MessagesRequest.logprob_token_ids",
)
"""Fields whose effect is that the request is refused."""
HISTORY = frozenset(
    (
        *(
            "OllamaMessage",
            "ChatMessage",
            "MessageToolCall",
            "CalledFunction",
            "AnthropicMetadata",
            "HostedTool",
        ),
        *("TextBlock", "ToolReferenceBlock", "ToolUseBlock", "ToolResultBlock", "ThinkingBlock"),
        *("RedactedThinkingBlock", "ServerToolBlock", "MessageItem", "ItemReference"),
        *("FunctionCallItem", "CustomToolCallItem", "ToolOutputItem", "ReasoningItem"),
        "ReasoningPart",
    )
)
"""Models whose unknown fields are ignored: clients send back answers with fields of their own."""
_TEMPLATE = chat_templates.QWEN.replace(
    "{{- m.content }}", "{{- (m.name or '') + (m.tool_call_id or '') + m.content }}"
).replace("{{- '\n<tool_call>", "{{- call.id + '\n<tool_call>")


@pytest.fixture(scope="module")
def reader() -> RequestReader:
    """Its model thinks, and its tokenizer adds a token at the beginning."""
    tokenizer = load_tokenizer(resolve_source(DEFAULT_MODEL), _TEMPLATE)
    tokenizer.backend.add_special_tokens(["<think>", "</think>"])
    begin = "<|im_start|>"
    tokenizer.backend.post_processor = TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {begin} $B",
        special_tokens=[(begin, tokenizer.backend.token_to_id(begin))],
    )
    info = EngineInfo(
        model="m",
        served_model_names=("m",),
        max_model_len=2048,
        vocab_size=tokenizer.backend.get_vocab_size(),
        cache=CacheInfo(num_blocks=9, block_size=32, dtype="bfloat16", enable_prefix_caching=True),
        scheduler=SchedulerConfig(),
        settings={},
        hidden_size=8,
        num_labels=1,
    )
    serving = Serving(
        info=info,
        max_completions=8,
        default_max_tokens=None,
        max_output_tokens=None,
        trust_request_chat_template=True,
        message_special_tokens="text",
        unknown_fields="refuse",
    )
    return RequestReader(tokenizer, ModelDefaults(eos_token_ids=(2,), sampling={}), serving)


def value_of(schema: str, name: str) -> Any:
    return VALUES[key_of(VALUES, schema, name)]


def key_of(table: Container[str], schema: str, name: str) -> str:
    whole = f"{schema}.{name}"
    return whole if whole in table else name


def put(schema: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the schema's body with these fields in its object; null removes one."""
    _, body, path = PLACES[schema]
    body = copy.deepcopy(body)
    target: Any = body
    for key in path:
        target = target[key]
    target.update(fields)
    return body


def read(reader: RequestReader, kind: Kind, body: dict[str, Any]) -> bytes | str:
    """Return what is made of a body, without warnings and echoes; a text if it is refused."""
    try:
        parts = list(reader.read(kind, msgspec.json.encode(body)))
    except (InvalidRequestError, ApiError) as error:
        return str(error)
    kept = [part for part in parts if not isinstance(part, Warned)]
    return b"".join(
        pack_frame(
            _without_repeated(part)
            if isinstance(part, Job) and part.operation == "responses" and kind == "responses"
            else part
        )
        for part in kept
    )


def _without_repeated(job: Job) -> Job:
    """Leave out what the response repeats of its request."""
    terms = msgspec.structs.replace(job.terms_as(ResponseTerms), shown={})
    return msgspec.structs.replace(job, terms=packed(terms))


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_a_field_changes_something_or_says_why_not(reader: RequestReader, field: Any) -> None:
    schema, name = field.schema, field.name
    kind = PLACES[schema].kind
    if name in ONLY_FOR_RENDERING and kind in ("chat", "completions", "responses", "messages"):
        kind = f"render_{kind}"  # type: ignore[assignment]
    if field.has_one_value:
        told = read(reader, kind, put(schema, {name: "frobnicate"}))
        assert isinstance(told, str)
        assert name in told
        return
    beside = BESIDE.get(key_of(BESIDE, schema, name), {})
    without = read(reader, kind, put(schema, beside))
    with_field = read(reader, kind, put(schema, {**beside, name: value_of(schema, name)}))
    if field.words.startswith("changes nothing"):
        assert field.words.startswith("changes nothing: "), "the reference says why"
        assert isinstance(without, bytes), without
        assert with_field == without
        return
    assert with_field != without == read(reader, kind, put(schema, beside))
    assert isinstance(with_field, bytes) or key_of(CHECKED, schema, name) in CHECKED, with_field


def test_only_histories_may_have_unknown_fields() -> None:
    def below(model: type[BaseModel]) -> set[type[BaseModel]]:
        return {model}.union(*map(below, model.__subclasses__()))

    lenient = {m.__name__ for m in below(RequestModel) if m.model_config["extra"] != "forbid"}
    assert lenient - {"LenientModel"} == HISTORY
