"""`legato generate` and `legato chat`, on the real model."""

import os
import signal
from pathlib import Path

from tests.cli.test_main import legato
from tests.exact import EXACT
from tests.forks.start import run, start

SMALL = (*EXACT, "--num-threads", "1", "--max-model-len", "2048", "--kv-cache-memory", "256M")
CHAT = ("legato", "chat", *SMALL)
GREEDY = ("--temperature", "0")


def test_generate_completes_its_prompts_in_order() -> None:
    one = legato("generate", "The sky is", *SMALL, *GREEDY, "--max-tokens", "5")
    assert one.returncode == 0
    both = legato("generate", "Paris is", "The sky is", *SMALL, *GREEDY, "--max-tokens", "5")
    assert both.stdout.endswith(f"\n\n{one.stdout}")


def test_generate_says_what_is_wrong_with_a_setting() -> None:
    done = legato("generate", "x", *SMALL, "--temperature", "-1")
    assert done.returncode == 2
    assert "legato: temperature must be" in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_remembers_until_reset() -> None:
    question = "What did I just say?\n"
    lines = f"{question}I like green apples.\n{question}\n/reset\n{question}"
    done = run(*CHAT, *GREEDY, "--max-tokens", "16", "--stop", "\n", text=lines)
    assert "Traceback" not in done.stderr
    _help, first, _greeting, with_history, after_reset = done.stdout.strip().split("\n")
    assert first == after_reset != with_history


def test_chat_goes_on_after_a_conversation_that_is_too_long() -> None:
    lines = "word " * 200 + "\n/reset\nWhat is the capital of France?\n"
    done = run(*CHAT, *GREEDY, "--max-model-len", "100", text=lines)
    assert "maximum context length" in done.stderr
    assert "Paris" in done.stdout


def test_ctrl_c_stops_an_answer_but_not_the_chat(tmp_path: Path) -> None:
    question = "Tell me a very long story.\n"
    command = (*CHAT, "--seed", "1", "--max-tokens", "100")
    whole = run(*command, text=question).stdout
    given, stdin = os.pipe()
    shown, stdout = os.pipe()
    with (
        open(stdin, "w") as typed,
        open(shown) as printed,
        (tmp_path / "errors").open("w+") as errors,
    ):
        chat = start(*command, stdin=given, stdout=stdout, stderr=errors.fileno())
        os.close(given)
        os.close(stdout)
        print(question, end="", file=typed, flush=True)
        begun = printed.readline() + printed.read(1)
        chat.send_signal(signal.SIGINT)
        print("/reset", file=typed)
        typed.close()
        answer = (begun + printed.read()).rstrip("\n")
        assert chat.wait() == 0
    assert "Traceback" not in (tmp_path / "errors").read_text()
    assert whole.startswith(answer)
    assert len(answer) < len(whole) / 2
