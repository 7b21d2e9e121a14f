"""What do vLLM's and llama.cpp's own tests say of Legato?

    python -m benchmarks peer_tests [--suite llama.cpp] [--file test_chat_completion.py]

Fetches the source package that has the tests from PyPI into the user's cache, starts a server with
the default model, which goes by any name, and runs those tests against it that ask a server over
HTTP for what Legato has. Each failure is named by `failures.py`: the model's, the test's own
assumption, or a feature that the docs list as not offered. Exits with status 1 if a failure has no
name there.
"""

import argparse
import shlex
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.clients.tokenizer import save_tokenizer
from benchmarks.clients.trial import Target
from benchmarks.peer_tests.failures import VLLM_REASONS, reason_of
from benchmarks.peer_tests.llama_cpp_failures import LLAMA_CPP_REASONS
from benchmarks.peer_tests.suite import SUITES, fetch, outcomes
from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, running_server
from legato.core.config import DEFAULT_MODEL

MINUTES = 15

_REASONS = {"vllm": VLLM_REASONS, "llama.cpp": LLAMA_CPP_REASONS}

_FLAGS = (
    *("--served-model-name", DEFAULT_MODEL, "*", "--trust-request-chat-template"),
    *("--enable-tokenizer-info-endpoint", "--kv-cache-memory", "512M", "--no-calibrate"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", choices=SUITES, default="vllm", help="whose tests")
    parser.add_argument("--file", action="append", help="this file of the suite alone")
    parser.add_argument("--patience", type=int, default=60, metavar="SECONDS", help="for one test")


def measure(run: Run) -> int:
    suite = SUITES[run.flags.suite]
    source = fetch(suite)
    command = f"{SERVE} {shlex.join(_FLAGS)}"
    with tempfile.TemporaryDirectory() as folder, running_server(command) as url:
        save_tokenizer(Path(folder))
        target = Target(url, DEFAULT_MODEL, Path(folder))
        files = run.flags.file or suite.files
        found = outcomes(suite, source, target, files, run.flags.patience)
    failed = [one for one in found if one.outcome == "failed"]
    patterns = _REASONS[run.flags.suite]
    reasons = {one.test: reason_of(one, patterns) for one in failed}
    for one in failed:
        reason = reasons[one.test]
        told = f"{reason.kind}: {reason.why}" if reason else f"UNNAMED: {one.message[:300]}"
        run.tell(f"{one.test}\n  {told}")
    passed = sum(one.outcome == "passed" for one in found)
    kinds = Counter(reason.kind if reason else "unnamed" for reason in reasons.values())
    run.tell(f"{passed} passed, {len(failed)} failed: {dict(kinds)}")
    run.write({"outcomes": found, "reasons": reasons})
    return int("unnamed" in kinds)


if __name__ == "__main__":
    main("peer_tests")
