"""Other servers' names and forms of an option mean the same as OpenAI's, or are refused by name."""

from typing import Any

import pytest

from legato.api.bodies.body_model import validated
from legato.api.openai.chat_body import ChatRequest
from legato.api.openai.completion_body import CompletionRequest
from legato.core.errors import InvalidRequestError

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
READ = ("output_limit", "effort", "template_variables", "thinking_token_budget")


@pytest.mark.parametrize(
    ("sent", "known"),
    [
        ({"num_predict": 9}, {"max_tokens": 9}),
        ({"num_predict": 9, "max_tokens": 9}, {"max_tokens": 9}),
        ({"num_predict": -1}, {}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1}),
        ({"repeat_penalty": 1, "repeat_last_n": 64}, {"repetition_penalty": 1}),
        ({"think": True}, {"enable_thinking": True}),
        ({"think": "high"}, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "auto"}}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}},
         {"enable_thinking": True, "thinking_token_budget": 0}),
        ({"thinking": {"type": "auto", "clear_thinking": False}, "chat_template_kwargs": {"a": 1}},
         {"chat_template_kwargs": {"clear_thinking": False, "a": 1}}),
        ({"reasoning": {"effort": "low", "max_tokens": 9, "enabled": True}},
         {"reasoning_effort": "low", "thinking_token_budget": 9, "enable_thinking": True}),
    ],
)  # fmt: skip
def test_another_form_means_the_same(sent: dict[str, Any], known: dict[str, Any]) -> None:
    one, other = (validated(ChatRequest, {**CHAT, **fields}) for fields in (sent, known))
    assert [getattr(one, name) for name in READ] == [getattr(other, name) for name in READ]
    assert one.sent_params() == other.sent_params()


def test_the_report_of_usage_has_two_forms() -> None:
    for fields in ({"usage": {"include": True}}, {"stream_options": {"include_usage": True}}):
        request = validated(ChatRequest, {**CHAT, "stream": True, **fields})
        assert request.answer_options(field_names={}).include_usage


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"num_predict": 9, "max_tokens": 8}, "num_predict"),
        ({"num_predict": 0}, "num_predict"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"think": True, "enable_thinking": False}, "think"),
        ({"thinking": {"type": "enabled"}, "think": False}, "thinking"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning"),
        ({"mirostat": 2}, "mirostat"),
        ({"tfs_z": 0.5}, "tfs_z"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"plugins": [{"id": "web"}]}, "plugins"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
def test_what_would_change_the_answer_is_refused(sent: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        validated(ChatRequest, {**CHAT, **sent})
    assert refused.value.param == param


def test_completions_take_the_same_names() -> None:
    request = validated(CompletionRequest, {"prompt": "Hi", "repeat_penalty": 1.5, "num_ctx": 4096})
    assert request.sent_params()["repetition_penalty"] == 1.5
    warned = [warning.param for warning in request.unheeded_settings(8192)]
    assert warned == ["num_ctx"]
