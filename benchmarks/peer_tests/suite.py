"""vLLM's tests: fetched from its source package, and run in an environment of their own."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
import platformdirs

from benchmarks.clients.trial import Target

VERSION = "0.33.0"
_INDEX = "https://pypi.org/simple/vllm/"
_INDEX_TYPE = "application/vnd.pypi.simple.v1+json"
_ARCHIVE = f"vllm-{VERSION}.tar.gz"
_PLUGIN = Path(__file__).parent / "plugin.py"
_PACKAGES = (
    *("pytest", "pytest-asyncio", "pytest-timeout", "openai", "anthropic", "transformers"),
    *("requests", "httpx", "fastapi", "jinja2", "jsonschema", "prometheus_client", "numpy"),
    *("regex", "pybase64", "orjson", "tblib", "openai-harmony"),
)
FILES = (
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_extra_content_fields.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_namespace_tool_separator.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_structured_output.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "anthropic/test_messages.py",
    "serve/tokenize/test_tokenization.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_metrics.py",
    "serve/instrumentator/test_orca_metrics.py",
    "scale_out/render/test_launch_render.py",
    "scale_out/render/test_render.py",
)
"""Below vLLM's `tests/entrypoints`: those that ask a server, without images and gpt-oss."""


class Outcome(msgspec.Struct, frozen=True):
    """How a test went.

    Attributes:
        test: its id, below `tests/entrypoints`.
        message: the last line of what went wrong.
    """

    test: str
    outcome: str
    message: str


def fetch() -> Path:
    """Return the folder of vLLM's source package; it is fetched once, and kept in the cache.

    Raises:
        ValueError: the archive is not the one that the index describes.
    """
    cache = platformdirs.user_cache_path("legato") / "peer_tests"
    folder = cache / f"vllm-{VERSION}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    index = httpx.get(_INDEX, headers={"Accept": _INDEX_TYPE}).json()
    [found] = [file for file in index["files"] if file["filename"] == _ARCHIVE]
    archive = httpx.get(found["url"], timeout=600, follow_redirects=True).content
    if hashlib.sha256(archive).hexdigest() != found["hashes"]["sha256"]:
        raise ValueError(f"{_ARCHIVE} has another hash than PyPI says")
    with tempfile.NamedTemporaryFile(suffix=".tar.gz") as file:
        file.write(archive)
        file.flush()
        with tarfile.open(file.name) as packed:
            packed.extractall(cache, filter="data")
    # These two load torch and vLLM; the plugin stands in for them.
    for name in ("conftest.py", "utils.py"):
        (folder / "tests" / name).unlink()
    return folder


def outcomes(source: Path, target: Target, files: Sequence[str], patience_s: int) -> list[Outcome]:
    """Run tests against a server.

    Args:
        source: as of `fetch`.
        files: of `FILES`.
        patience_s: seconds for one test.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        (Path(folder) / "legato_plugin.py").write_text(_PLUGIN.read_text())
        command = [
            *(
                str(_python()),
                "-m",
                "pytest",
                "-q",
                "-p",
                "legato_plugin",
                "-p",
                "no:cacheprovider",
            ),
            *("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"),
            *("--timeout", str(patience_s), "--continue-on-collection-errors", "--tb", "line"),
            *(f"tests/entrypoints/{file}" for file in files),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": folder,
            "HF_HUB_OFFLINE": "1",
            "PEER_TESTS_URL": target.url,
            "PEER_TESTS_TOKENIZER": str(target.tokenizer),
            "PEER_TESTS_VERSION": VERSION,
            "PEER_TESTS_REPORT": str(report),
        }
        subprocess.run(command, cwd=source, env=environment, stdout=subprocess.DEVNULL)
        lines = report.read_text().splitlines()
    return [_outcome(**json.loads(line)) for line in lines]


def _outcome(test: str, outcome: str, message: str) -> Outcome:
    return Outcome(test.partition("entrypoints/")[2], outcome, message)


def _python() -> Path:
    """Return the interpreter of the tests' own environment, which is made once."""
    folder = platformdirs.user_cache_path("legato") / "peer_tests" / "environment"
    python = folder / "bin" / "python"
    if not (folder / "made").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "--quiet", "install", *_PACKAGES]
        subprocess.run(install, check=True)
        (folder / "made").touch()
    return python
