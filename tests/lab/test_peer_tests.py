"""`benchmarks.peer_tests`: what it says of failures."""

import pytest
from benchmarks.peer_tests.failures import reason_of
from benchmarks.peer_tests.suite import FILES, Outcome


@pytest.mark.parametrize(
    ("test", "message", "kind"),
    [
        ("openai/test_x.py::test_y", "400 - use_beam_search: only false", "not offered"),
        ("openai/test_x.py::test_y", "<MagicMock name='vllm.x'>", "test"),
        ("openai/test_x.py::test_y", "Failed: Timeout (>30.0s)", "model"),
        ("scale_out/render/test_render.py::test_chat_render_x", "400 == 200", "not offered"),
    ],
)
def test_a_known_failure_has_a_name(test: str, message: str, kind: str) -> None:
    reason = reason_of(Outcome(test, "failed", message))
    assert reason is not None
    assert reason.kind == kind


@pytest.mark.parametrize("message", ["Error code: 500", "400 - messages: x", "assert 1 == 2"])
def test_a_new_failure_has_none(message: str) -> None:
    unnamed = [
        file for file in FILES if not reason_of(Outcome(f"{file}::test_new", "failed", message))
    ]
    assert "openai/chat_completion/test_chat.py" in unnamed
    assert "openai/completion/test_completion.py" in unnamed
    assert "anthropic/test_messages.py" in unnamed
