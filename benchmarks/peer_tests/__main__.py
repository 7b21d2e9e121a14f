"""What do vLLM's own tests say of Legato?

    python -m benchmarks peer_tests [--file openai/chat_completion/test_chat.py]

Fetches vLLM's source package from PyPI into the user's cache, starts a server with the default
model, which goes by any name, and runs those of vLLM's tests that ask a server over HTTP against
it. Each failure is named by `failures.py`: the model's, the test's own assumption, or a feature
that the docs list as not offered. Exits with status 1 if a failure has no name there.
"""

import argparse
import shlex
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.clients.tokenizer import save_tokenizer
from benchmarks.clients.trial import Target
from benchmarks.peer_tests.failures import reason_of
from benchmarks.peer_tests.suite import FILES, fetch, outcomes
from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, running_server
from legato.core.config import DEFAULT_MODEL

MINUTES = 15

_FLAGS = (
    *("--served-model-name", DEFAULT_MODEL, "*", "--trust-request-chat-template"),
    *("--enable-tokenizer-info-endpoint", "--kv-cache-memory", "512M", "--no-calibrate"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", action="append", choices=FILES, help="this one alone")
    parser.add_argument("--patience", type=int, default=60, metavar="SECONDS", help="for one test")


def measure(run: Run) -> int:
    source = fetch()
    command = f"{SERVE} {shlex.join(_FLAGS)}"
    with tempfile.TemporaryDirectory() as folder, running_server(command) as url:
        save_tokenizer(Path(folder))
        target = Target(url, DEFAULT_MODEL, Path(folder))
        found = outcomes(source, target, run.flags.file or FILES, run.flags.patience)
    failed = [one for one in found if one.outcome == "failed"]
    reasons = {one.test: reason_of(one) for one in failed}
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
