"""What a chat template says is read once for all conversations."""

from typing import Any

import pytest

from legato.core.errors import InvalidRequestError
from legato.language.conversation.template import ChatTemplates
from legato.language.message.known_syntaxes import HERMES
from legato.language.tokenizer.tokenizer import Tokenizer
from tests.language.tokenizer_families import family

_ANY_ROLE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_TWO_ROLES = "{% for m in messages %}{{ {'user': 'U', 'judge': 'J'}[m.role] }}{% endfor %}"


class Rendered:
    """Counts how often a tokenizer's templates are rendered."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        render = tokenizer.render_chat

        def counted(*args: Any, **kwargs: Any) -> str:
            self.count += 1
            return render(*args, **kwargs)

        monkeypatch.setattr(tokenizer, "render_chat", counted)


def said(role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": "Hi"}]


def test_a_template_is_read_once() -> None:
    templates = ChatTemplates(family("qwen"))
    own = templates.get()
    assert templates.get() is own
    assert templates.get(has_tools=True) is own
    given = templates.get(_ANY_ROLE)
    assert given is not own
    assert templates.get(_ANY_ROLE) is given
    assert given.syntax.tool_calls == HERMES


def test_the_text_of_its_own_template_is_not_its_own_if_a_request_brings_it() -> None:
    """The checkpoint declares the syntax of its own template only."""
    tokenizer = family("qwen")
    templates = ChatTemplates(tokenizer)
    assert templates.get(tokenizer.chat_template()) is not templates.get()


def test_templates_of_requests_are_forgotten() -> None:
    templates = ChatTemplates(family("qwen"))
    first = templates.get(_ANY_ROLE)
    for i in range(8):
        templates.get(f"{_ANY_ROLE}{i}")
    assert templates.get(_ANY_ROLE) is not first


def test_roles_are_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = family("qwen")
    template = ChatTemplates(tokenizer).get(_ANY_ROLE)
    rendered = Rendered(tokenizer, monkeypatch)
    for role in ("judge", "poet", "judge"):
        text, _ = template.render(said(role), options={})
        assert text.startswith(f"{role}: Hi")
    assert rendered.count == 4  # three conversations and one probe


def test_a_role_that_the_template_names_is_taken_without_a_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = family("qwen")
    template = ChatTemplates(tokenizer).get(_TWO_ROLES)
    rendered = Rendered(tokenizer, monkeypatch)
    assert template.render(said("judge"), options={}).text == "J"
    assert rendered.count == 1
    with pytest.raises(InvalidRequestError, match="role 'poet'") as refused:
        template.render([*said("user"), *said("poet")], options={})
    assert refused.value.param == "messages.1.role"


def test_the_end_of_a_prompt_tells_whether_the_reply_thinks() -> None:
    template = ChatTemplates(family("qwen")).get("{{ messages }}<think></think>")
    assert template.reply_syntax("x<think>\n").is_reasoning_open
    assert template.may_think("x<think>\n")
    assert not template.reply_syntax("x<think></think>\n\n").is_reasoning_open
    assert not template.may_think("x<think></think>\n\n")
