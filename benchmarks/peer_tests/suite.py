"""Peers' tests: fetched from source packages, and run in environments of their own."""

import hashlib
import json
import os
import shutil
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

_INDEX = "https://pypi.org/simple/{}/"
_INDEX_TYPE = "application/vnd.pypi.simple.v1+json"
_PLUGINS = Path(__file__).parent
_CACHE = platformdirs.user_cache_path("legato") / "peer_tests"
_VLLM_FILES = (
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
    "scale_out/token_in_token_out/test_serving_tokens.py",
)
"""Tests that ask a server, without images and gpt-oss."""


class Outcome(msgspec.Struct, frozen=True):
    """How a test went.

    Attributes:
        test: its id, below `Suite.below`.
        message: the last line of what went wrong.
    """

    test: str
    outcome: str
    message: str


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's tests.

    Attributes:
        project: whose source package on PyPI has them.
        folder: of the tests, within the package.
        files: tests that ask a server for what Legato has, below `below`.
        below: a folder in `folder`.
        packages: that they need.
        plugin: points them at a server.
        replaced: files of the tests that the plugin stands in for.
        options: further ones of pytest.
    """

    project: str
    version: str
    folder: str
    files: tuple[str, ...]
    below: str
    packages: tuple[str, ...]
    plugin: str
    replaced: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def release(self) -> str:
        return f"{self.project}-{self.version}"


VLLM = Suite(
    project="vllm",
    version="0.33.0",
    folder="",
    files=_VLLM_FILES,
    below="tests/entrypoints/",
    packages=(
        *("pytest", "pytest-asyncio", "pytest-timeout", "openai", "anthropic", "transformers"),
        *("requests", "httpx", "fastapi", "jinja2", "jsonschema", "prometheus_client", "numpy"),
        *("regex", "pybase64", "orjson", "tblib", "openai-harmony"),
    ),
    plugin="vllm_plugin",
    replaced=("tests/conftest.py", "tests/utils.py"),  # they load torch and vLLM
)
LLAMA_CPP = Suite(
    project="llama_cpp_python",
    version="0.3.36",
    folder="vendor/llama.cpp/tools/server/tests/",
    files=(
        "test_chat_completion.py",
        "test_compat_anthropic.py",
        "test_compat_oai_responses.py",
        "test_tool_call.py",
    ),
    below="unit/",
    packages=(
        *("pytest", "pytest-asyncio", "pytest-timeout", "openai", "requests", "filelock", "numpy"),
        "prometheus_client",
    ),
    plugin="llama_plugin",
    options=("-m", "not slow"),  # the slow ones are of large models
)
SUITES = {"vllm": VLLM, "llama.cpp": LLAMA_CPP}


def fetch(suite: Suite) -> Path:
    """Return the folder of a suite's tests; it is fetched once, and kept in the cache.

    Raises:
        ValueError: the archive is not the one that the index describes.
    """
    folder = _CACHE / suite.release / suite.folder
    if folder.is_dir():
        return folder
    _CACHE.mkdir(parents=True, exist_ok=True)
    index = httpx.get(
        _INDEX.format(suite.project.replace("_", "-")), headers={"Accept": _INDEX_TYPE}
    ).json()
    name = f"{suite.release}.tar.gz"
    [found] = [file for file in index["files"] if file["filename"] == name]
    archive = httpx.get(found["url"], timeout=600, follow_redirects=True).content
    if hashlib.sha256(archive).hexdigest() != found["hashes"]["sha256"]:
        raise ValueError(f"{name} has another hash than PyPI says")
    with tempfile.NamedTemporaryFile(suffix=".tar.gz") as file:
        file.write(archive)
        file.flush()
        with tarfile.open(file.name) as packed:
            wanted = f"{suite.release}/{suite.folder}"
            members = [one for one in packed.getmembers() if one.name.startswith(wanted)]
            packed.extractall(_CACHE, members, filter="data")
    for replaced in suite.replaced:
        (folder / replaced).unlink()
    return folder


def outcomes(
    suite: Suite, source: Path, target: Target, files: Sequence[str], patience_s: int
) -> list[Outcome]:
    """Run tests against a server.

    Args:
        source: as of `fetch`.
        files: of the suite's.
        patience_s: seconds for one test.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        for plugin in ("report_plugin", suite.plugin):
            shutil.copy(_PLUGINS / f"{plugin}.py", folder)
        command = [
            *(str(_python(suite)), "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "report_plugin", "-p", suite.plugin, *suite.options),
            *("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"),
            *("--timeout", str(patience_s), "--continue-on-collection-errors", "--tb", "line"),
            *(f"{suite.below}{file}" for file in files),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((folder, str(source))),
            "HF_HUB_OFFLINE": "1",
            "PEER_TESTS_URL": target.url,
            "PEER_TESTS_TOKENIZER": str(target.tokenizer),
            "PEER_TESTS_VERSION": suite.version,
            "PEER_TESTS_REPORT": str(report),
        }
        subprocess.run(command, cwd=source, env=environment, stdout=subprocess.DEVNULL)
        lines = report.read_text().splitlines()
    return [_outcome(suite, **json.loads(line)) for line in lines]


def _outcome(suite: Suite, test: str, outcome: str, message: str) -> Outcome:
    return Outcome(test.partition(suite.below)[2], outcome, message)


def _python(suite: Suite) -> Path:
    """Return the interpreter of a suite's own environment, which is made once."""
    folder = _CACHE / f"environment-{suite.release}"
    python = folder / "bin" / "python"
    if not (folder / "made").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "--quiet", "install", *suite.packages]
        subprocess.run(install, check=True)
        (folder / "made").touch()
    return python
