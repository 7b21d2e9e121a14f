"""What `legato chat` shows of an answer, without a model."""

import io
from collections.abc import Generator

import pytest

from legato.cli import conversation
from legato.cli.conversation import AnswerPiece, Message, converse


def answer(messages: list[Message]) -> Generator[AnswerPiece]:
    yield AnswerPiece(thought="two and ")
    yield AnswerPiece(thought="two", num_tokens=2)
    yield AnswerPiece(f"4, at turn {len(messages)}")
    yield AnswerPiece(num_tokens=6)


class Lines(io.StringIO):
    def __init__(self, text: str, *, is_terminal: bool) -> None:
        super().__init__(text)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by half a second each time that it is read."""
    times = iter(range(1000))
    monkeypatch.setattr(conversation.time, "monotonic", lambda: next(times) / 2)


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("is_terminal", [False, True])
def test_thoughts_and_timings_of_the_last_answer(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Lines("", is_terminal=is_terminal)
    monkeypatch.setattr("sys.stdin", Lines("2+2?\n/timings\n/thinking\n", is_terminal=False))
    monkeypatch.setattr("sys.stdout", shown)
    converse(answer, None)
    timings = "first token after 0.50 s, 6 tokens, 200.0 ms each, 5 a second"
    told = shown.getvalue().removeprefix(f"{conversation.HELP}\n")
    if is_terminal:
        dim, plain = "\x1b[2m", "\x1b[0m"
        begin = f"{dim}two and {plain}{dim}two{plain}\n\n4, at turn 1\n{dim}{timings}{plain}\n"
    else:
        begin = "4, at turn 1\n"
    assert told == f"{begin}{timings}\ntwo and two\n"


def test_before_any_answer_there_is_nothing_to_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Lines("/timings\n/thinking\n", is_terminal=False))
    converse(answer, None)
    _, *told = capsys.readouterr().out.splitlines()
    assert told == ["there is no answer yet", "the last answer came without thinking"]
