"""What is copied field by field is copied whole: a field that is left out has a reason here.

A call that hands on at least three attributes of one object under their own names copies it. A new
field of what it makes, which has a default and so could be forgotten, fails here.
"""

import ast
import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
from msgspec.structs import fields
from pydantic import BaseModel

from legato import LLM, AsyncLLM
from legato.api.anthropic.message_body import MessagesRequest
from legato.api.bodies.chat_messages import TemplateOptions
from legato.api.bodies.generation_options import ServiceOptions
from legato.api.openai.chat_body import ChatRequest
from legato.api.openai.completion_body import CompletionRequest
from legato.api.openai.generate_body import GenerateRequest, SentSamplingParams
from legato.api.rendering import RenderedPrompt
from legato.api.responses.response_body import ResponsesRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.language.conversation.template import ConversationKeywords, ConversationOptions

_ROOT = Path(__file__).parents[1]
SOURCES = (_ROOT / "src" / "legato", _ROOT / "packages" / "fleet")
COPIED = 3
"""Attributes that make a call a copy."""

LEFT_OUT = {
    "Arrival": {"cut_choices": "known only once the request runs"},
    "ChatAnswer": {
        "timings": "put in where they are asked for",
        "prompt_progress": "comes before the first token",
        "legato": "put in where warnings are known",
        "system_fingerprint": "the same in all answers",
    },
    "ChatChunk": {
        "timings": "put in where they are asked for",
        "prompt_progress": "comes before the first token",
        "legato": "put in where warnings are known",
        "system_fingerprint": "the same in all answers",
    },
    "CompletionAnswer": {
        "timings": "put in where they are asked for",
        "prompt_progress": "comes before the first token",
        "legato": "put in where warnings are known",
        "system_fingerprint": "the same in all answers",
        "kv_transfer_params": "a prompt that was sent away has another answer",
    },
    "ConversationOptions": {
        "tools": "shown as `tool_choice` says",
        "chat_template_content_format": "contents are text",
        "message_special_tokens": "the server decides",
        "thinking_token_budget": "the server has budgets of its own",
    },
    "EngineInfo": {
        "start_s": "known at the start's end",
        "has_any_name": "the server decides",
        "transfer": "known once it listens",
    },
    "OllamaShown": {
        "modelfile": "there is none",
        "modified_at": "the same for all models",
    },
    "RecurrenceRule": {
        "longest": "the delta rule has no steps",
        "shortest": "the delta rule has no steps",
    },
    "RenderedPrompt": {
        "features": "only text is supported",
        "output_mode": "the client chooses it",
        "ec_transfer_params": "only text is supported",
    },
    "RequestArrived": {"replica_id": "the fleet adds it"},
    "RequestOutput": {
        "error": "a token was sampled",
        "is_asked_for": "a token was sampled",
        "refusal": "a token was sampled",
        "retry_after_s": "a token was sampled",
    },
    "StepBegun": {"replica_id": "the fleet adds it"},
    "StepRecord": {"received_s": "the front end adds it", "replica_id": "the fleet adds it"},
    "Update": dict.fromkeys(
        ("totals", "settings", "flags", "about", "history", "replicas"),
        "sent at first, or when it changes",
    ),
    "ServiceParams": {
        "allow_best_effort": "not in a trace: a replay refuses no request",
        "cache_salt": "a replay shares no blocks",
        "cache_owner": "likewise",
        "cache_nonce": "likewise",
    },
}
"""Key a class; value its fields that copies leave at their defaults, and why."""

OF_TOKENS = {"bad_words_token_ids", "kept_special_tokens", "thinking_limit"}
"""Sampling parameters that no client sends: servers make them of `bad_words` and of tools."""
AS_CHAT = {"n", "stop", "logprobs", "prompt_logprobs", "structured_outputs", "max_tokens"}
"""Sampling parameters that other APIs do not have, or name otherwise, as `chat` says."""
BODIES: dict[type[BaseModel], set[str]] = {
    ChatRequest: OF_TOKENS,
    CompletionRequest: OF_TOKENS,
    SentSamplingParams: {*OF_TOKENS, "truncate_prompt_tokens"},  # its prompt is in tokens
    ResponsesRequest: OF_TOKENS | AS_CHAT,
    MessagesRequest: OF_TOKENS | AS_CHAT - {"max_tokens"},
}
"""Key a body; value the sampling parameters that it does not have."""
OF_SERVERS = {"cache_owner", "cache_nonce"}
"""Fields of `ServiceParams` that follow from the API key and from `cache_prompt`."""


class Classes:
    """The classes of some sources, by name."""

    def __init__(self, trees: list[ast.Module]) -> None:
        self._found: defaultdict[str, list[ast.ClassDef]] = defaultdict(list)
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._found[node.name].append(node)

    def fields(self, name: str) -> list[str]:
        """Return the attributes of a class, but for constants; none if two have its name."""
        match self._found[name]:
            case [node]:
                return list(dict.fromkeys(self._attributes(node)))
        return []

    def _attributes(self, node: ast.ClassDef) -> Iterator[str]:
        for base in node.bases:
            yield from self.fields(_last_name(base))
        for part in node.body:
            match part:
                case ast.AnnAssign(target=ast.Name(name), annotation=kind):
                    if not ast.unparse(kind).startswith(("Literal", "ClassVar")):
                        yield name


def left_out(trees: list[ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield each class and field that a copy leaves at its default."""
    classes = Classes(trees)
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = _last_name(call.func)
        same = Counter(
            ast.unparse(keyword.value.value)
            for keyword in call.keywords
            if isinstance(keyword.value, ast.Attribute)
            and keyword.value.attr.lstrip("_") == keyword.arg
        )
        given = {keyword.arg for keyword in call.keywords}
        if max(same.values(), default=0) >= COPIED and None not in given:
            for field in classes.fields(name)[len(call.args) :]:
                if field not in given:
                    yield name, field


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def test_copies_are_whole() -> None:
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for folder in SOURCES
        for path in folder.rglob("*.py")
    ]
    known = {(name, field) for name, reasons in LEFT_OUT.items() for field in reasons}
    assert set(left_out(trees)) == known


def test_a_new_field_is_missed() -> None:
    source = """
class Base: a: int
class Made(Base):
    b: int
    c: int = 0
    tag: Literal["made"] = "made"
    new: int = 0
Made(one.a, b=one.b, c=one.c)
made = Made(a=one.a, b=one.b, c=one.c)
"""
    assert list(left_out([ast.parse(source)])) == [("Made", "new")]


@pytest.mark.parametrize("body", BODIES)
def test_a_body_has_all_sampling_parameters(body: type[BaseModel]) -> None:
    assert set(SamplingParams.__struct_fields__) - body.model_fields.keys() == BODIES[body]


def test_a_request_and_its_rendering_say_how_it_is_served() -> None:
    for names in (
        ServiceOptions.model_fields,
        GenerateRequest.model_fields,
        RenderedPrompt.__struct_fields__,
    ):
        assert set(ServiceParams.__struct_fields__) - set(names) == OF_SERVERS
    sent = {"tenant": "a", "priority": 3, "cache_salt": "s", "allow_best_effort": True}
    params = ServiceOptions(slo_class="batch", **sent).service_params()
    assert params == ServiceParams(slo_class="batch", **sent)


def test_a_chat_has_the_options_of_a_conversation() -> None:
    options = {field.name: field.default for field in fields(ConversationOptions)}
    of_server = {"chat_template_content_format", "message_special_tokens"}
    sent = TemplateOptions.model_fields
    assert options.keys() - sent.keys() == of_server
    assert all(sent[name].default == options[name] for name in options.keys() - of_server)
    assert get_type_hints(ConversationKeywords) == get_type_hints(ConversationOptions)
    for chat in (LLM.chat, AsyncLLM.chat):
        known = inspect.signature(chat).parameters
        assert {name: known[name].default for name in options} == options
        assert all(f"            {name}: " in (chat.__doc__ or "") for name in options)


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="frobnicate"):
        LLM.chat(LLM.__new__(LLM), [], frobnicate=True)  # type: ignore[call-arg]
