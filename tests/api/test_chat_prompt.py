"""Conversations with tools and reasoning, as chat templates of several families write them."""

from typing import Any

import msgspec
import pytest

from legato.api.anthropic.input_blocks import AnthropicMessage, assistant_message
from legato.api.bodies.chat_messages import ChatMessage, TemplateOptions
from legato.api.bodies.chat_tools import Tool, functions_of
from legato.api.responses.input_items import messages_of, read_items
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.core.errors import InvalidRequestError
from legato.language.conversation.prompt import ChatPrompts, RenderedChat
from legato.language.message.known_syntaxes import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED
from legato.language.message.message_syntax import ToolCallSyntax
from legato.language.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.api import chat_templates

_TOOL = Tool.model_validate(
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
)
_HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "A sum.",
        "tool_calls": [
            {
                "id": "call_5",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_5", "content": "3"},
    {"role": "tool", "tool_call_id": "call_5", "content": "three"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_source(DEFAULT_MODEL))


def make(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    tools: tuple[Tool, ...] = (),
    effort: str | None = None,
    **options: Any,
) -> tuple[RenderedChat, str]:
    prompts = ChatPrompts(
        tokenizer,
        trusts_templates=True,
        special_tokens="text",
        check_fits=lambda _chars, _field: None,
    )
    prompt = prompts.make(
        [ChatMessage.model_validate(message).for_template() for message in messages],
        TemplateOptions(**options).conversation_options,
        functions_of(tools),
        effort=effort,
    )
    return prompt, tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def test_a_model_that_knows_no_tools_is_told_of_them(tokenizer: Tokenizer) -> None:
    prompt, text = make(tokenizer, _HISTORY, tools=(_TOOL,))
    assert prompt.syntax.tool_calls == HERMES
    assert text.startswith("<|im_start|>system\nYou can call functions.")
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in text
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in text
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\nthree\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in text


def test_its_own_system_message_comes_first(tokenizer: Tokenizer) -> None:
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Be brief."}, *_HISTORY]
        _, text = make(tokenizer, messages, tools=(_TOOL,))
        assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
        _, text = make(tokenizer, messages)
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_no_tools_change_nothing(tokenizer: Tokenizer) -> None:
    _, text = make(tokenizer, _HISTORY[:1])
    assert "function" not in text


@pytest.mark.parametrize(
    ("template", "syntax", "call"),
    [
        ("qwen", HERMES, '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'),
        ("llama", LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        ("mistral", MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "'),
        ("named", MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'),
    ],
)
def test_a_template_writes_tools_and_calls_itself(
    tokenizer: Tokenizer, template: str, syntax: ToolCallSyntax, call: str
) -> None:
    prompt, text = make(
        tokenizer,
        _HISTORY,
        tools=(_TOOL,),
        chat_template=chat_templates.KNOWING_TOOLS[template],
    )
    assert prompt.syntax.tool_calls == syntax
    assert '"name": "add"' in text
    assert "You can call functions" not in text
    assert call in text


def test_mistral_sees_ids_of_nine_characters(tokenizer: Tokenizer) -> None:
    _, text = make(tokenizer, _HISTORY, chat_template=chat_templates.MISTRAL)
    call_id = text.partition('"id": "')[2][:9]
    assert call_id.isalnum()
    assert f"[TOOL_RESULTS]{call_id}3[/TOOL_RESULTS]" in text


@pytest.mark.parametrize("template", chat_templates.KNOWING_TOOLS)
def test_older_calls_have_the_ids_that_templates_write(tokenizer: Tokenizer, template: str) -> None:
    """`function_call` and the role `function` have no ids; results go to calls in their order."""
    source = chat_templates.KNOWING_TOOLS[template]
    function = {"name": "add", "arguments": '{"a": 1}'}
    history: list[dict[str, Any]] = [{"role": "user", "content": "1?"}]
    for result in ("one", "two"):
        history += [
            {"role": "assistant", "content": "", "function_call": function},
            {"role": "function", "name": "add", "content": result},
        ]
    _, text = make(tokenizer, history, tools=(_TOOL,), chat_template=source)
    assert "one" in text
    if template == "kimi":
        assert "functions.add:0<|tool_call_argument_begin|>" in text
        assert "functions.add:1<|tool_call_argument_begin|>" in text
    if template == "mistral":
        ids = [part[:9] for part in text.split('"id": "')[1:]]
        assert len(set(ids)) == 2
        assert f"[TOOL_RESULTS]{ids[0]}one" in text
        assert f"[TOOL_RESULTS]{ids[1]}two" in text


def test_calls_and_results_without_ids(tokenizer: Tokenizer) -> None:
    call = {"function": {"name": "add", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "b"}]},
        {"role": "tool", "content": "second", "tool_call_id": "b"},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "of none", "tool_call_id": "z"},
    ]
    _, text = make(tokenizer, history, chat_template=chat_templates.MISTRAL)
    first, second = (part[:9] for part in text.split('"id": "')[1:])
    assert f"[TOOL_RESULTS]{second}second[/TOOL_RESULTS][TOOL_RESULTS]{first}first" in text


def test_tools_go_where_a_template_has_a_place(tokenizer: Tokenizer) -> None:
    """A template without tools, without a system role: the first user message has them."""
    template = {"chat_template": chat_templates.NO_SYSTEM}
    prompt, text = make(tokenizer, _HISTORY[:1], tools=(_TOOL,), **template)
    assert prompt.syntax.tool_calls == HERMES
    assert text.startswith("<start_of_turn>user\nYou can call functions.")
    assert text.endswith("\n\n1 + 2?<end_of_turn>\n<start_of_turn>model\n")
    more = [*_HISTORY, {"role": "user", "content": "Sure?"}]
    _, text = make(tokenizer, more, tools=(_TOOL,), **template)
    assert '<start_of_turn>model\n<tool_call>\n{"name": "add"' in text
    assert "</tool_response>\n\nSure?<end_of_turn>" in text
    system = {"role": "system", "content": "Be brief."}
    for role in ("system", "developer"):
        _, text = make(tokenizer, [{**system, "role": role}, *_HISTORY[:1]], **template)
        assert text.startswith("<start_of_turn>user\nBe brief.\n\n1 + 2?<end_of_turn>")
    _, text = make(tokenizer, [system], **template)
    assert text.startswith("<start_of_turn>user\nBe brief.<end_of_turn>")
    _, text = make(tokenizer, [system, {**_HISTORY[0], "name": "Ann"}], **template)
    assert text.startswith("<start_of_turn>user\nBe brief.\n\n1 + 2?<end_of_turn>")
    twice = _HISTORY[:1] * 2
    with pytest.raises(InvalidRequestError, match="alternate"):
        make(tokenizer, twice, **template)
    with pytest.raises(InvalidRequestError, match="alternate"):
        make(tokenizer, [{"role": "assistant", "content": "Hi"}, system], **template)


_SYSTEM_FIRST = """{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}{{ raise_exception('comes first') }}
{%- elif not loop.first and message.role == messages[loop.index0 - 1].role -%}
{{ raise_exception('roles must alternate') }}
{%- endif -%}[{{ message.role }}]{{ message.content }}
{%- endfor -%}"""


def test_a_system_message_stays_where_a_template_takes_it(tokenizer: Tokenizer) -> None:
    """Only a later one moves; a fault of other messages stays one."""
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1?"}
    answer = {"role": "assistant", "content": "1."}
    for said in ([user, user], [system, user, user]):
        with pytest.raises(InvalidRequestError, match="alternate"):
            make(tokenizer, said, chat_template=_SYSTEM_FIRST)
    later = {"role": "system", "content": "Be polite."}
    _, text = make(tokenizer, [system, user, answer, later, user], chat_template=_SYSTEM_FIRST)
    assert text == "[system]Be brief.[user]1?[assistant]1.[user]Be polite.\n\n1?"


def test_arguments_that_are_no_json_stay_text(tokenizer: Tokenizer) -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": '}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    _, text = make(tokenizer, messages, chat_template=chat_templates.QWEN)
    assert '"arguments": "{\\"a\\": "}' in text
    make(tokenizer, messages)


_TEMPLATES = {
    **chat_templates.KNOWING_TOOLS,
    **{
        f"{name} by .items()": template.replace("arguments | items", "arguments.items()")
        for name, template in chat_templates.FAMILIES.items()
        if "arguments | items" in template
    },
    "without tools": chat_templates.NO_TOOLS,
}
_ODD_ARGUMENTS = [
    *(None, "", " \n", "null", '""', "{}", [1, "x"], "[1]", 5, "5", True, "1e999", '"x"', '{"a": '),
    *({"a": 1}, '{"a": 1}', '"{\\"a\\": 1}"', "[" * 2000),
]


@pytest.mark.parametrize("arguments", _ODD_ARGUMENTS, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("api", ["chat", "functions", "responses", "messages"])
def test_a_history_with_odd_arguments_goes_on(
    tokenizer: Tokenizer, api: str, arguments: Any
) -> None:
    """Every template takes a conversation with any arguments that a model may have written."""
    if api == "chat":
        call: dict[str, Any] = {"id": "add", "function": {"name": "add", "arguments": arguments}}
        said: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    elif api == "functions":
        said = {"role": "assistant", "function_call": {"name": "add", "arguments": arguments}}
    elif api == "responses":
        item = {"type": "function_call", "call_id": "add", "name": "add"}
        item["arguments"] = arguments
        read: Any = read_items([item])
        [(_, said)] = messages_of([("input.0", read[0])])
    else:
        block = {"type": "tool_use", "id": "add", "name": "add", "input": arguments}
        message = AnthropicMessage.model_validate({"role": "assistant", "content": [block]})
        said = assistant_message(message.content)
    for name, template in _TEMPLATES.items():
        _, text = make(tokenizer, [_HISTORY[0], said], chat_template=template)
        assert "add" in text, name
        assert "None" not in text, name
        if arguments in (None, "", " \n", "null", '""', "{}"):
            assert "null" not in text, name
            assert "invalid" not in text, name
        if arguments in ([1, "x"], "[1]", {"a": 1}, '"{\\"a\\": 1}"'):
            assert "1" in text.partition("add")[2], name


def test_arguments_are_an_object_only_where_a_template_wants_one(tokenizer: Tokenizer) -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": "[1, 2]"}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    _, text = make(tokenizer, messages, chat_template=chat_templates.QWEN)
    assert '"arguments": [1, 2]}' in text
    _, text = make(tokenizer, messages, chat_template=chat_templates.QWEN_CODER)
    assert "<parameter=invalid>\n[1, 2]\n</parameter>" in text


def test_reasoning_of_a_history_reaches_the_template(tokenizer: Tokenizer) -> None:
    _, text = make(tokenizer, _HISTORY, chat_template=chat_templates.QWEN)
    assert "<think>\nA sum.\n</think>" in text


@pytest.mark.parametrize(("effort", "is_open"), [(None, False), ("high", True), ("none", False)])
def test_a_prompt_may_end_in_reasoning(
    tokenizer: Tokenizer, effort: str | None, is_open: bool
) -> None:
    prompt, text = make(tokenizer, _HISTORY[:1], effort=effort, chat_template=chat_templates.QWEN)
    assert prompt.syntax.reasoning is not None
    assert prompt.syntax.is_reasoning_open is is_open
    assert text.endswith("</think>\n\n") == (effort == "none")


def test_a_template_that_reads_no_effort_ignores_it(tokenizer: Tokenizer) -> None:
    for template in (None, chat_templates.NO_TOOLS):
        plain = make(tokenizer, _HISTORY[:1], chat_template=template)
        for effort in ("none", "low", "max"):
            prompt, text = make(tokenizer, _HISTORY[:1], effort=effort, chat_template=template)
            assert not prompt.reads_effort
            assert (msgspec.structs.replace(prompt, reads_effort=True), text) == plain


def test_a_template_without_reasoning_has_none(tokenizer: Tokenizer) -> None:
    prompt, _ = make(tokenizer, _HISTORY[:1], chat_template=chat_templates.NO_TOOLS)
    assert prompt.syntax.without_calls().is_plain


@pytest.mark.parametrize("template", [chat_templates.NO_TOOLS, chat_templates.QWEN])
def test_a_role_that_the_template_takes(tokenizer: Tokenizer, template: str) -> None:
    message = {"role": "critic", "content": "Too long."}
    _, text = make(tokenizer, [message], chat_template=template)
    assert "critic" in text
    assert "Too long." in text


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}",
    ],
)
def test_a_role_that_the_template_does_not_take(tokenizer: Tokenizer, template: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "critic", "content": "Too long."}]
    with pytest.raises(InvalidRequestError, match="does not take the role 'critic'") as caught:
        make(tokenizer, messages, chat_template=template)
    assert caught.value.param == "messages.1.role"
    named = template + "{% if messages[0].role == 'critic' %}{% endif %}"
    make(tokenizer, messages, chat_template=named)
