"""The page with a chat, which is the first that people see."""

import json
from typing import Any

import pytest

from tests.api.launch import ServerProcess
from tests.browser.conftest import KEY
from tests.browser.test_dashboard import AUDIT

pytestmark = pytest.mark.browser


@pytest.fixture
def chat(blank: Any, target: ServerProcess) -> Any:
    """The page at the root, with its key."""
    blank.goto(target.url)
    blank.get_by_label("Key", exact=True).fill(KEY)
    blank.keyboard.press("Enter")
    blank.locator("#send:enabled").wait_for()
    return blank


def test_a_chat_has_turns_and_says_how_fast_they_came(chat: Any) -> None:
    chat.get_by_label("Message").fill("My name is Ada. Say one short sentence.")
    chat.keyboard.press("Enter")
    first = chat.locator(".timings")
    first.wait_for()
    told = first.inner_text()
    assert told.startswith("first token after ")
    assert " a second" in told
    chat.get_by_label("Message").fill("What is my name?")
    with chat.expect_request("**/v1/chat/completions") as asked:
        chat.get_by_role("button", name="Send").click()
    sent = asked.value.post_data_json["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert sent[1]["content"] == chat.locator(".answer").first.inner_text()
    chat.locator(".timings").nth(1).wait_for()
    chat.get_by_role("button", name="New chat").click()
    assert not chat.locator(".answer").count()
    assert chat.locator("#model").inner_text()


def test_an_answer_can_be_stopped(chat: Any, target: ServerProcess) -> None:
    chat.get_by_label("Message").fill("Tell me a very long story of a lighthouse.")
    chat.keyboard.press("Enter")
    chat.locator(".answer:not(:empty)").wait_for()
    chat.get_by_role("button", name="Stop").click()
    chat.get_by_text("stopped").wait_for()
    target.wait_for_metric("num_requests_running", 0)
    assert chat.get_by_role("button", name="Send").is_enabled()


def test_thoughts_are_folded_and_errors_are_shown(chat: Any) -> None:
    chunks = [
        {"choices": [{"delta": {"reasoning_content": "two and two"}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "<b>4</b>"}, "finish_reason": "length"}]},
        {"error": {"message": "the engine died"}},
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    chat.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    chat.get_by_label("Message").fill("2 + 2?")
    chat.keyboard.press("Enter")
    chat.get_by_text("the engine died").wait_for()
    assert chat.locator(".thinking .answer").text_content() == "two and two"
    assert chat.locator(".turn > .answer").inner_text() == "<b>4</b>"
    assert "cut at its longest" in chat.locator(".timings").inner_text()
    assert chat.get_by_label("Message").input_value() == "2 + 2?"


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_can_be_read_and_used(chat: Any, width: int) -> None:
    chat.set_viewport_size({"width": width, "height": 700})
    assert chat.evaluate(AUDIT) == {"unnamed": [], "faint": []}
    assert chat.evaluate("document.documentElement.scrollWidth") <= width
