"""Forced ends of thoughts, proven against each family's template and tokens: a round trip."""

from functools import lru_cache

import pytest

from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.core.outputs import FinishReason
from legato.language.conversation.prompt import ChatPrompts, RenderedChat
from legato.language.conversation.template import ConversationOptions
from legato.language.conversation.thought_end import QWEN3_MESSAGE, thinking_limit
from legato.language.message.message import read_message
from legato.language.tokenizer.tokenizer import Tokenizer, load_tokenizer
from legato.scheduler.thinking import ThinkingWatch
from tests.api import chat_templates

MAGISTRAL = chat_templates.MISTRAL_NAMED.replace(
    "{%- for call in m.tool_calls",
    "{%- if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}"
    "{%- for call in m.tool_calls",
    1,
)
OPEN = chat_templates.QWEN_CODER.replace(
    "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}"
)
"""As those of Qwen3.5 and 3.6, which open the thought in the prompt."""
FAMILIES = {
    "qwen3": (chat_templates.QWEN, f"{QWEN3_MESSAGE}</think>\n\n"),
    "qwen3.5": (OPEN, "</think>\n\n"),
    "deepseek": (chat_templates.DEEPSEEK, "</think>"),
    "deepseek v3.2": (chat_templates.DSML, "</think>"),
    "glm": (chat_templates.GLM, "</think>\n"),
    "kimi": (chat_templates.KIMI, "</think>"),
    "minimax": (chat_templates.MINIMAX, "</think>\n\n"),
    "magistral": (MAGISTRAL, "[/THINK]"),
    "gemma": (chat_templates.GEMMA, "<channel|>"),
    "harmony": (
        chat_templates.HARMONY,
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
"""Key a family; value its template, and the text that ends its thoughts."""
MARKS = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    *("<tool_call>", "</tool_call>"),
)
BEGUN = {"harmony": "<|channel|>analysis<|message|>", "gemma": "<|channel>thought\n"}


@lru_cache
def family(name: str) -> tuple[Tokenizer, RenderedChat]:
    """Its tokenizer, and the prompt of a conversation."""
    tokenizer = load_tokenizer(resolve_source(DEFAULT_MODEL), FAMILIES[name][0])
    tokenizer.backend.add_special_tokens([*MARKS])
    tokenizer = Tokenizer(tokenizer.pretrained)
    prompts = ChatPrompts(
        tokenizer, trusts_templates=False, special_tokens="text", check_fits=lambda *_: None
    )
    return tokenizer, prompts.make([{"role": "user", "content": "Hi"}], ConversationOptions())


def begun(name: str) -> str:
    """What the model writes to begin a thought, if the prompt has not."""
    syntax = family(name)[1].syntax
    mark = syntax.reasoning.begin if syntax.reasoning is not None else ""
    return "" if syntax.is_reasoning_open else BEGUN.get(name, mark)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_thought_that_is_cut_is_reasoning_and_then_content(name: str) -> None:
    tokenizer, prompt = family(name)
    syntax = prompt.syntax.without_calls()
    limit = thinking_limit(tokenizer, syntax, prompt.thought_end, 60)
    assert limit is not None
    assert limit.is_open == (name == "qwen3.5")
    forced = tokenizer.decode([*limit.forced], skip_special_tokens=False)
    assert forced == FAMILIES[name][1]
    message = read_message(
        f"{begun(name)}It is long. And{forced}42", FinishReason.STOP, syntax, None
    )
    said = FAMILIES[name][1].partition("<")[0] if name == "qwen3" else ""
    assert (message.reasoning, message.content) == (f"It is long. And{said}".strip(), "42")


@pytest.mark.parametrize("budget", [1, 5, 60])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_thought_ends_at_its_budget(name: str, budget: int) -> None:
    """Nothing else is said in thought, and a short budget leaves the makers' words out."""
    tokenizer, prompt = family(name)
    limit = thinking_limit(tokenizer, prompt.syntax.without_calls(), prompt.thought_end, budget)
    assert limit is not None
    watch, count = ThinkingWatch(limit), 0
    for token_id in tokenizer.encode(begun(name), add_special_tokens=False):
        assert not watch.take(token_id)
    (word,) = tokenizer.encode(" again", add_special_tokens=False)
    while not watch.take(word):
        count += 1
    assert count + 1 + limit.num_said == budget
    assert watch.cut(len) == limit.forced
    assert watch.num_tokens == budget
    for token_id in tokenizer.encode(begun(name), add_special_tokens=False)[:-1]:
        assert not watch.take(token_id)
    if begun(name):
        assert watch.take(tokenizer.encode(begun(name), add_special_tokens=False)[-1])
        assert watch.cut(len) == limit.forced_again
    assert watch.num_tokens == budget


def test_harmony_may_call_after_a_first_cut_and_answers_after_a_second() -> None:
    tokenizer, prompt = family("harmony")
    limit = thinking_limit(tokenizer, prompt.syntax, prompt.thought_end, 5)
    assert limit is not None
    first, again = (
        tokenizer.decode([*ids], skip_special_tokens=False)
        for ids in (limit.forced, limit.forced_again)
    )
    assert first == "<|end|><|start|>assistant<|channel|>"
    assert again == f"{first}final<|message|>"


def test_a_thought_may_end_at_a_line_break_close_to_its_budget() -> None:
    tokenizer, prompt = family("qwen3.5")
    limit = thinking_limit(tokenizer, prompt.syntax, prompt.thought_end, 100)
    assert limit is not None
    line_break, word = (tokenizer.encode(text, False)[0] for text in ("\n", " again"))
    for num_before, ends in ((93, False), (94, True), (98, True)):
        watch = ThinkingWatch(limit)
        assert not any(watch.take(word) for _ in range(num_before))
        assert watch.take(line_break) == ends


def test_no_thought_begins_in_a_tool_call() -> None:
    tokenizer, prompt = family("qwen3")
    limit = thinking_limit(tokenizer, prompt.syntax, prompt.thought_end, 0)
    assert limit is not None
    begin, call, end = (tokenizer.encode(mark)[0] for mark in ("<think>", *MARKS[-2:]))
    watch = ThinkingWatch(limit)
    assert [watch.take(one) for one in (call, begin, begin, end, begin)] == [*4 * [False], True]
    assert not watch.num_tokens


def test_marks_that_are_no_tokens_have_no_limit() -> None:
    tokenizer = load_tokenizer(resolve_source(DEFAULT_MODEL), chat_templates.QWEN)
    _, prompt = family("qwen3")
    assert thinking_limit(tokenizer, prompt.syntax, prompt.thought_end, 5) is None


def test_a_second_thought_after_a_free_channel_ends_at_once() -> None:
    """The given tokens begin the channel, and the model writes the rest of the mark."""
    tokenizer, prompt = family("harmony")
    limit = thinking_limit(tokenizer, prompt.syntax, prompt.thought_end, 1)
    assert limit is not None
    watch = ThinkingWatch(limit)
    begun_ids = tokenizer.encode(begun("harmony"), add_special_tokens=False)
    assert [watch.take(one) for one in (*begun_ids, 7)][-1]
    assert watch.cut(len)[-1] == begun_ids[0]
    assert [watch.take(one) for one in begun_ids[1:]][-1]
    assert watch.cut(len) == limit.forced_again


def test_words_that_no_longer_fit_do_not_count() -> None:
    tokenizer, prompt = family("qwen3")
    limit = thinking_limit(tokenizer, prompt.syntax, prompt.thought_end, 60)
    assert limit is not None
    assert limit.num_said > 1
    watch = ThinkingWatch(limit)
    begun_ids = tokenizer.encode(begun("qwen3"), add_special_tokens=False)
    assert [watch.take(one) for one in (*begun_ids, *[7] * (60 - limit.num_said))][-1]
    assert watch.cut(lambda _: 1) == limit.forced[:1]
    assert watch.num_tokens == 60 - limit.num_said + 1


def test_a_budget_of_nothing_switches_thinking_off() -> None:
    def switch(budget: int | None, **variables: bool) -> object:
        options = ConversationOptions(
            thinking_token_budget=budget, chat_template_kwargs=variables or None
        )
        return options.variables.get("enable_thinking")

    assert [switch(budget) for budget in (None, -1, 7, 0)] == [None, None, None, False]
    assert switch(0, enable_thinking=True)
