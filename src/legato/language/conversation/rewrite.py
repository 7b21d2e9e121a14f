"""Rewrites conversations for chat templates that lack roles, tools or tool calls."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from legato.language.message.known_syntaxes import HERMES

_INSTRUCTIONS = """You can call functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

To call a function, answer with its name and its arguments in JSON within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""

Message = dict[str, Any]

_MEDIUM_OF = {
    **dict.fromkeys(("image", "images", "image_url", "input_image"), "images"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "sounds"),
    **dict.fromkeys(("video", "videos", "video_url", "input_video"), "videos"),
    **dict.fromkeys(("file", "input_file", "document"), "files"),
}
"""Key the type of a content part, or a field of a message, value what it has."""


def with_tools_in_system_message(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> list[Message]:
    """Return the conversation with its tools in the system message, in Hermes' form.

    Args:
        tools: in OpenAI's form.
    """
    if not tools:
        return list(messages)
    signatures = "\n".join(map(_json, tools))
    text = _INSTRUCTIONS.format(tools=signatures)
    if messages and messages[0].get("role") == "system":
        first, *others = messages
        return [{**first, "content": _followed(first.get("content"), text)}, *others]
    return [{"role": "system", "content": text}, *messages]


def with_calls_in_content(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with tool calls and their results as content, in Hermes' form."""
    written: list[Message] = []
    was_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result and was_result:
            written[-1]["content"] += f"\n{_result(message)}"
        elif is_result:
            written.append({"role": "user", "content": _result(message)})
        else:
            written.append(_written_out(message))
        was_result = is_result
    return written


def with_role(messages: Sequence[Message], role: str, instead: str) -> list[Message]:
    """Return the conversation with another role in place of `role`."""
    return [
        {**message, "role": instead} if message.get("role") == role else message
        for message in messages
    ]


def with_call_ids(messages: Sequence[Message], pattern: str) -> list[Message]:
    """Return the conversation with ids for calls and results that have none, in their order.

    OpenAI's older `function_call` has no id, which many templates require.

    Args:
        pattern: of an id, made of "{name}" and "{id}".
    """
    written: list[Message] = []
    unanswered: list[str] = []
    num_calls = 0
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "id": call.get("id") or pattern.format(name=_name(call), id=num_calls + i)}
                for i, call in enumerate(calls)
            ]
            num_calls += len(calls)
            unanswered = [call["id"] for call in message["tool_calls"]]
        elif message.get("role") == "tool":
            if unanswered and not message.get("tool_call_id"):
                message["tool_call_id"] = unanswered[0]
            if message.get("tool_call_id") in unanswered:
                unanswered.remove(message["tool_call_id"])
        written.append(message)
    return written


def with_system_in_user_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation without system messages: their text begins the next user message.

    Texts of one role in a row become one message, since templates without a system role also
    demand that roles alternate.
    """
    written: list[Message] = []
    for message in with_role(messages, "system", "user"):
        last = written[-1] if written else {}
        is_plain = message.keys() | last.keys() <= {"role", "content", "name"}
        if is_plain and message.get("role") == last.get("role"):
            texts = (content_text(each.get("content")) for each in (last, message))
            written[-1] = {**last, **message, "content": "\n\n".join(texts)}
        else:
            written.append(message)
    return written


def with_ids_of(messages: Sequence[Message], num_chars: int) -> list[Message]:
    """Return the conversation with call ids of the length that its template requires.

    Ids of another length, from other servers, are replaced, alike in a call and its result.
    """

    def fitting(call_id: str) -> str:
        if len(call_id) == num_chars and call_id.isalnum():
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:num_chars]

    written: list[Message] = []
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "id": fitting(call.get("id", ""))} for call in message["tool_calls"]
            ]
        if message.get("tool_call_id"):
            message["tool_call_id"] = fitting(message["tool_call_id"])
        written.append(message)
    return written


def with_argument_text(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with the arguments of calls as JSON text."""

    def text_of(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            return call
        return {**call, "function": {**function, "arguments": _json(arguments)}}

    return _with_calls(messages, text_of)


def with_argument_objects(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with the arguments of every call as an object.

    What is none comes under "invalid", as it does in Anthropic's API.
    """

    def object_of(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            return call
        return {**call, "function": {**function, "arguments": {"invalid": arguments}}}

    return _with_calls(messages, object_of)


def with_thinking(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with reasoning as `thinking`.

    gpt-oss's template takes either that or content beside calls: content, which users have read.
    """

    def is_read(message: Message) -> bool:
        has_both = message.get("tool_calls") and message.get("content")
        return "reasoning_content" in message and not has_both

    return [
        {**message, "thinking": message["reasoning_content"]} if is_read(message) else message
        for message in messages
    ]


def arguments_object(arguments: Any) -> Any:
    """Parse a call's arguments, which templates expect as an object.

    Empty arguments and null become an empty object, and JSON in a string is parsed too. What is no
    object stays JSON of another type, and invalid JSON stays text.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        found = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return arguments
    inner = arguments_object(found) if found is None or isinstance(found, str) else found
    return inner if isinstance(inner, Mapping) else found


def content_text(content: Any) -> str:
    """Return the text of a content, which may be missing or in parts."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def why_not_read(kind: object) -> str:
    """Return why a part or a field of a message is refused, to follow "is not supported".

    Empty unless it has an image, a sound, a video or a file.

    Args:
        kind: the type of the part, or the name of the field.
    """
    medium = _MEDIUM_OF.get(kind) if isinstance(kind, str) else None
    return f": {medium} are not read, for only the text part of a model runs" if medium else ""


def _name(call: dict[str, Any]) -> str:
    name: str = call["function"]["name"]
    return name


def _with_calls(
    messages: Sequence[Message], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[Message]:
    """Return the conversation with each tool call changed."""
    return [
        {**message, "tool_calls": list(map(change, message["tool_calls"]))}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _followed(content: Any, text: str) -> Any:
    """Append a text to a content."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n\n{text}"


def _written_out(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [
        f"{HERMES.begin}\n{_json(call['function'])}\n{HERMES.end}" for call in message["tool_calls"]
    ]
    kept["content"] = "\n".join(filter(None, [content_text(message.get("content")), *calls]))
    return kept


def _result(message: Message) -> str:
    return f"<tool_response>\n{content_text(message.get('content'))}\n</tool_response>"


def _json(value: object) -> str:
    """Dump JSON with the spaces that models were trained on."""
    return json.dumps(value, ensure_ascii=False)
