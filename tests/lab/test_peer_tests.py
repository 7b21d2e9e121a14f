"""`benchmarks.peer_tests`: what it says of failures."""

from collections.abc import Iterable

import pytest
from benchmarks.peer_tests.failures import VLLM_REASONS, Pattern, reason_of
from benchmarks.peer_tests.llama_cpp_failures import LLAMA_CPP_REASONS
from benchmarks.peer_tests.suite import LLAMA_CPP, VLLM, Outcome, Suite


@pytest.mark.parametrize(
    ("patterns", "test", "message", "kind"),
    [
        (VLLM_REASONS, "test_x.py::test_y", "400 - use_beam_search: only false", "not offered"),
        (VLLM_REASONS, "test_x.py::test_y", "<MagicMock name='vllm.x'>", "test"),
        (VLLM_REASONS, "test_x.py::test_y", "Failed: Timeout (>30.0s)", "model"),
        (LLAMA_CPP_REASONS, "test_x.py::test_y", "Failed: Timeout (>30.0s)", "model"),
        (LLAMA_CPP_REASONS, "test_x.py::test_y", "return_progress is not", "not offered"),
    ],
)
def test_a_known_failure_has_a_name(
    patterns: Iterable[Pattern], test: str, message: str, kind: str
) -> None:
    reason = reason_of(Outcome(test, "failed", message), patterns)
    assert reason is not None
    assert reason.kind == kind


@pytest.mark.parametrize("message", ["Error code: 500", "400 - messages: x", "assert 1 == 2"])
def test_a_new_failure_has_none(message: str) -> None:
    def unnamed(suite: Suite, patterns: Iterable[Pattern]) -> list[str]:
        outcomes = {file: Outcome(f"{file}::test_new", "failed", message) for file in suite.files}
        return [file for file, one in outcomes.items() if not reason_of(one, patterns)]

    files = unnamed(VLLM, VLLM_REASONS)
    assert "openai/chat_completion/test_chat.py" in files
    assert "openai/completion/test_completion.py" in files
    assert "anthropic/test_messages.py" in files
    assert unnamed(LLAMA_CPP, LLAMA_CPP_REASONS) == list(LLAMA_CPP.files)
