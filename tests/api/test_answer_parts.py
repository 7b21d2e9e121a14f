"""What each API makes of a text, in any deltas, is what the whole text is read as."""

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.api.anthropic.output_blocks import ContentBlocks
from legato.api.job import AnswerOptions, Job, JobPrompt
from legato.api.openai.chat_answer import ChatFormat
from legato.api.responses.output_items import OutputItems
from legato.api.responses.response_events import OutputTokens
from legato.core.outputs import FinishReason, RequestOutput, TokenLogprobs
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.token_ids import token_array
from legato.core.vocabulary import Vocabulary
from legato.language.completion import CompletionDelta, CompletionStream
from legato.language.message import known_syntaxes
from legato.language.message.known_syntaxes import HARMONY, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED
from legato.language.message.message import MessageReader, TextSpan, read_message
from legato.language.message.message_syntax import Marks, MessageSyntax, ToolCallSyntax
from tests.api.chat_templates import FAMILIES
from tests.api.written_calls import Call, tools_of, written
from tests.profiles import examples

_THINK = Marks("<think>", "</think>")
_CALLS: list[Call] = [("f", {"s": "é <b> }", "n": 5, "l": [{"a": "x"}]}), ("g", {})]
_LONG_NAMED: Call = ("a_long_name", {"s": "x"})
_SYNTAXES = [
    *(HERMES, LLAMA, MISTRAL, MISTRAL_NAMED),
    *(getattr(known_syntaxes, name.upper()) for name in FAMILIES if name != "harmony"),
]

Said = tuple[str, str, list[tuple[str, str]]]
"""The content, the reasoning, and each call's name and arguments."""


def _of(calls: ToolCallSyntax, reasoning: Marks | None = _THINK) -> MessageSyntax:
    tools = tools_of(*_CALLS, _LONG_NAMED) if calls.needs_types else None
    return MessageSyntax(reasoning=reasoning, tool_calls=calls, tools=tools)


def _call_of_harmony(call: Call) -> str:
    return written(HARMONY, call) + "<|call|>"


_WORDS = [" ", "\n\n", "A", "and then B", "é🎻", ";", ",", "]", "{", "<", "</", "[", "\u2028"]


def _parts(syntax: MessageSyntax) -> list[str]:
    """Whole parts of messages."""
    if syntax.tool_calls is None:
        headers = [f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary")]
        return [*map(_call_of_harmony, _CALLS), "<|end|>", "<|start|>assistant", *headers]
    calls = [written(syntax.tool_calls, call) for call in _CALLS]
    return [*calls, written(syntax.tool_calls, *_CALLS), "<think>\nI think</think>\n\n"]


@st.composite
def _texts(draw: st.DrawFn) -> tuple[MessageSyntax, list[bytes], list[int]]:
    """A text in a syntax, cut into tokens at any byte, and how many tokens each delta has."""
    syntax = draw(st.sampled_from([*map(_of, _SYNTAXES), HARMONY]))
    words, parts = st.sampled_from(_WORDS), st.sampled_from(_parts(syntax))
    pairs = draw(st.lists(st.tuples(parts | st.sampled_from(syntax.marks), words), max_size=4))
    data = "".join([draw(words), *itertools.chain.from_iterable(pairs)]).encode()
    cuts = sorted(draw(st.sets(st.integers(1, len(data) - 1), max_size=10))) if data[1:] else []
    tokens = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
    return syntax, tokens, draw(st.lists(st.integers(0, 4), max_size=len(tokens)))


def _deltas(tokens: list[bytes], sizes: list[int], reason: FinishReason) -> list[CompletionDelta]:
    """The deltas of a completion. Args: sizes: tokens in each; the last one takes the rest."""
    request = AddRequest(
        request_id="r", prompt_token_ids=token_array([1]), params=SamplingParams(logprobs=0)
    )
    stream = CompletionStream(0, request, _vocabulary(tokens))
    unread, deltas = list(range(len(tokens))), []
    for size in [*sizes, len(tokens)]:
        taken, unread = unread[:size], unread[size:]
        output = RequestOutput(
            request_id="r",
            new_token_ids=tuple(taken),
            logprobs=tuple(TokenLogprobs(i, -1.0, 1, ()) for i in taken),
            finish_reason=reason if size == len(tokens) else None,
        )
        deltas.append(stream.push(output))
        if output.finish_reason is not None:
            break
    return deltas


def _vocabulary(tokens: list[bytes]) -> Vocabulary:
    return Vocabulary.of(tokens, frozenset())


def _whole(
    text: str,
    syntax: MessageSyntax,
    reason: FinishReason = FinishReason.STOP,
    stop_reason: int | str | None = None,
) -> Said:
    message = read_message(text, reason, syntax, stop_reason)
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.content or "", message.reasoning or "", calls


def _in_chat(deltas: list[CompletionDelta], syntax: MessageSyntax) -> Said:
    job = Job(
        operation="chat",
        prompts=(JobPrompt(token_array([1])),),
        params=SamplingParams(),
        service=ServiceParams(),
        answer=AnswerOptions(is_streamed=True, message_syntax=syntax),
    )
    chat = ChatFormat(_vocabulary([]), job, answer_id="a", model="m")
    content, reasoning, calls = "", "", dict[int, list[str]]()
    for delta in deltas:
        chunk = _json(chat.chunk(0, msgspec.structs.replace(delta, logprobs=None), msgspec.UNSET))
        told = chunk["choices"][0]["delta"]
        content += told.get("content") or ""
        reasoning += told.get("reasoning") or ""
        for call in told.get("tool_calls", ()):
            said = calls.setdefault(call["index"], ["", ""])
            said[0] += call["function"].get("name", "")
            said[1] += call["function"]["arguments"]
    return content, reasoning, [(name, arguments) for name, arguments in calls.values()]


def _in_responses(deltas: list[CompletionDelta], syntax: MessageSyntax) -> Said:
    reader, items = MessageReader(syntax), OutputItems("a", {})
    events = [
        event
        for delta in deltas
        for event in items.take(reader.feed(delta.text, delta.finish_reason), lambda _: ())
    ]
    events += items.close("completed")
    texts, calls = {"message": "", "reasoning": ""}, []
    for item in map(_json, items.done):
        pieces = [
            event["delta"]
            for event in map(_json, events)
            if event["type"].endswith(".delta") and event["item_id"] == item["id"]
        ]
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
            assert "".join(pieces) == item["arguments"]
        else:
            [part] = item["content"]
            texts[item["type"]] += part["text"]
            assert "".join(pieces) == part["text"]
    return texts["message"], texts["reasoning"], calls


def _in_messages(deltas: list[CompletionDelta], syntax: MessageSyntax) -> Said:
    reader, blocks = MessageReader(syntax), ContentBlocks()
    events = [
        event
        for delta in deltas
        for event in blocks.take(reader.feed(delta.text, delta.finish_reason))
    ]
    begun: list[tuple[str, str]] = []  # each block's type and the tool's name
    texts: list[str] = []
    for event in map(_json, [*events, *blocks.close()]):
        if event["type"] == "content_block_start":
            assert event["index"] == len(begun)
            begun.append((event["content_block"]["type"], event["content_block"].get("name", "")))
            texts.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(begun) - 1
            key = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
            texts[-1] += event["delta"][key[begun[-1][0]]]
    said = list(zip(begun, texts, strict=True))
    content, reasoning = (
        "".join(text for (kind, _), text in said if kind == wanted)
        for wanted in ("text", "thinking")
    )
    return content, reasoning, [(name, text) for (kind, name), text in said if kind == "tool_use"]


def _json(value: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


@examples(400)
@given(
    _texts(),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_every_api_says_what_the_whole_text_says(
    cut: tuple[MessageSyntax, list[bytes], list[int]], reason: FinishReason
) -> None:
    syntax, tokens, sizes = cut
    deltas = _deltas(tokens, sizes, reason)
    whole = _whole(b"".join(tokens).decode(), syntax, reason)
    assert _in_chat(deltas, syntax) == whole
    assert _in_responses(deltas, syntax) == whole
    assert _in_messages(deltas, syntax) == whole


@examples(200)
@given(_texts())
def test_content_comes_with_its_tokens(cut: tuple[MessageSyntax, list[bytes], list[int]]) -> None:
    syntax, tokens, sizes = cut
    text = b"".join(tokens).decode()
    ends = [len(b"".join(tokens[: i + 1]).decode(errors="ignore")) for i in range(len(tokens))]
    places = list(itertools.pairwise([0, *ends]))
    reader, output = MessageReader(syntax), OutputTokens(_vocabulary(tokens), SamplingParams())
    scored: list[int] = []
    expected: set[int] = set()
    for delta in _deltas(tokens, sizes, FinishReason.STOP):
        output.add(delta)
        for part in reader.feed(delta.text, delta.finish_reason).parts:
            if not isinstance(part, TextSpan):
                continue
            assert text[part.start : part.end] == part.text
            if not part.is_reasoning:
                scored += [entry.token_id for entry in output.scored_in(part)]
                expected |= {
                    i for i, (a, b) in enumerate(places) if a < part.end and b > part.start
                }
                assert expected <= set(scored)
    assert scored == sorted(set(scored)), "each once, in order"
    without_text = {i for i, (start, end) in enumerate(places) if start == end}
    assert set(scored) - without_text == expected - without_text
    whole = _whole(text, syntax)
    if whole[0] == text:
        assert b"".join(tokens[i] for i in scored).decode() == text


@pytest.mark.parametrize(
    ("syntax", "tokens", "num_reasoning", "content"),
    [
        (
            _of(HERMES),
            ["Hello", ",", "\n", "\n", "world", " ", "<", "b", ">", "!"],
            0,
            ["Hello", ",", "\n", "\n", "world", " ", "<", "b", ">", "!"],
        ),
        (
            _of(HERMES),
            ["<think>", "\n", "First", "\n\n", "second", "\n", "</think>", "\n\n", "Done"],
            7,
            ["Done"],
        ),
        (
            _of(HERMES),
            ["<thi", "nk>", "I", " ", "think", "</", "think", ">So", " be"],
            8,
            [">So", " be"],
        ),
        (_of(HERMES), ["<think>", "I", " ", "think", " <", "/b"], 6, []),
        (
            msgspec.structs.replace(_of(HERMES), is_reasoning_open=True),
            ["", "I", " think", "</think>", "So"],
            4,
            ["So"],
        ),
        (
            HARMONY,
            [
                *("<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>", "<|start|>"),
                *("assistant", "<|channel|>", "final", "<|message|>", "Hi", " ", "you"),
                "<|return|>",
            ],
            6,
            ["Hi", " ", "you"],
        ),
        (MessageSyntax(), ["A", "\n", "<think>"], 0, ["A", "\n", "<think>"]),
    ],
)
def test_tokens_count_where_the_model_wrote_them(
    syntax: MessageSyntax, tokens: list[str], num_reasoning: int, content: list[str]
) -> None:
    data = [token.encode() for token in tokens]
    reader, output = MessageReader(syntax), OutputTokens(_vocabulary(data), SamplingParams())
    scored = []
    for delta in _deltas(data, [1] * (len(data) - 1), FinishReason.STOP):
        output.add(delta)
        for part in reader.feed(delta.text, delta.finish_reason).parts:
            if isinstance(part, TextSpan) and not part.is_reasoning:
                scored += [tokens[entry.token_id] for entry in output.scored_in(part)]
    assert output.num_in(reader.reasoning_spans) == num_reasoning
    assert scored == content


_CUTS = [(FinishReason.LENGTH, None), (FinishReason.STOP, "\n"), (FinishReason.STOP, 5)]
"""By the limit, by a stop string, and by a stop token of the request."""


@pytest.mark.parametrize("cut_by", _CUTS)
@pytest.mark.parametrize("syntax", [*map(_of, _SYNTAXES), HARMONY])
def test_what_is_cut_off_leaves_no_marks(
    syntax: MessageSyntax, cut_by: tuple[FinishReason, int | str | None]
) -> None:
    """A message that calls, cut after any character."""
    reason, stop_reason = cut_by
    if syntax.tool_calls is None:
        text = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary"
        text += "<|message|>Well<|end|><|start|>assistant" + _call_of_harmony(_CALLS[0])
    else:
        calls = written(syntax.tool_calls, *_CALLS)
        mark = syntax.tool_calls.begin if syntax.tool_calls.is_bare else ""
        text = f"<think>\nHm</think>\n\n{'' if mark else 'Well'}\n{mark}{calls}"
    content, reasoning, calls_made = _whole(text, syntax)
    for end in range(len(text)):
        cut = _whole(text[:end], syntax, *cut_by)
        assert content.startswith(cut[0].rstrip()), text[:end]
        assert reasoning.startswith(cut[1]), text[:end]
        for (name, arguments), whole in zip(cut[2], calls_made, strict=False):
            assert name == whole[0]
            assert whole[1].startswith(arguments)
        message = read_message(text[:end], reason, syntax, stop_reason)
        if reason is FinishReason.LENGTH or not cut[2]:
            assert message.finish_reason == reason
        elif message.finish_reason == "tool_calls":
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in cut[2])
    if syntax.tool_calls is not None:
        ended = read_message(text, FinishReason.STOP, syntax, "\n")
        assert ended.finish_reason == "tool_calls"


@pytest.mark.parametrize("cut_by", _CUTS)
@pytest.mark.parametrize("syntax", [*map(_of, _SYNTAXES), HARMONY])
def test_what_is_cut_off_before_its_arguments_is_nothing(
    syntax: MessageSyntax, cut_by: tuple[FinishReason, int | str | None]
) -> None:
    """A required call, the whole of the message, cut before it has a name."""
    if syntax.tool_calls is None:
        text = _call_of_harmony(_LONG_NAMED)
    else:
        mark = syntax.tool_calls.begin if syntax.tool_calls.is_bare else ""
        text = mark + written(syntax.tool_calls, _LONG_NAMED)
    for end in range(text.index("a_long_name") + len("a_long_name")):
        assert _whole(text[:end], syntax, *cut_by) == ("", "", [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A <tool_call>{}</tool_call> and then B", "A and then B"),
        ("A<tool_call>{}</tool_call> and then B", "A and then B"),
        ("A <tool_call>{}</tool_call>and then B", "A and then B"),
        ("A\n<tool_call>{}</tool_call>\n<tool_call>{}</tool_call>\n\nB\n", "A\nB"),
        ("\n<tool_call>{}</tool_call>\nB", "B"),
        ("A\n<tool_call>{}</tool_call>\n", "A"),
        ("A<tool_call>{}\nB", "A\nB"),  # without the closing mark
        ("A<tool_call>{}; B", "A B"),
    ],
)
def test_text_around_a_call_keeps_one_space(text: str, said: str) -> None:
    text = text.replace("{}", '{"name": "f", "arguments": {}}')
    for at in range(len(text)):
        deltas = _deltas([text[:at].encode(), text[at:].encode()], [1], FinishReason.STOP)
        for read in (_in_chat, _in_responses, _in_messages):
            assert read(deltas, _of(HERMES))[0] == said
