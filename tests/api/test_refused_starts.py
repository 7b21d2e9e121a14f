"""Starts that can come to nothing end at once, with a line that says why."""

import json
import math
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.api.launch import running_server
from tests.forks.start import run
from tests.fuzz.checkpoints import Seeds


def serve(
    *flags: str, preexec: Callable[[], None] | None = None
) -> "subprocess.CompletedProcess[str]":
    arguments = ("legato", "serve", "--port", "0", "--num-threads", "1", *flags)
    if preexec is None:
        return run(*arguments, timeout_s=60)
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True, text=True, check=False, timeout=60, preexec_fn=preexec,
    )  # fmt: skip


def told(stderr: str) -> list[str]:
    """But for the log's lines."""
    return [line for line in stderr.splitlines() if not re.match(r"\S+Z (INFO|WARNING) ", line)]


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    folder = Seeds(tmp_path).folder
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][12, 4] = math.nan
    save_file(tensors, folder / "model.safetensors")
    done = serve(str(folder))
    assert done.returncode == 2
    [refusal] = told(done.stderr)
    assert refusal.startswith("legato: ")
    assert "mlp.up_proj.weight has nan at [12, 4]: the checkpoint is damaged" in refusal


def test_a_tokenizer_with_an_absurd_id(tmp_path: Path) -> None:
    folder = Seeds(tmp_path).folder
    path = folder / "tokenizer.json"
    contents = json.loads(path.read_text())
    contents["model"]["vocab"]["xyz"] = 2**32 - 1
    path.write_text(json.dumps(contents))
    done = serve(str(folder))
    assert done.returncode == 2
    [refusal] = told(done.stderr)
    assert refusal.startswith(f"legato: cannot read {path}: the token 'xyz' has id 4294967295")


@pytest.mark.parametrize("mebibytes", [40, 200, 1200, 1600])
def test_too_little_address_space(mebibytes: int) -> None:
    limit = mebibytes * 2**20
    done = serve(
        "--kv-cache-memory", "64G",
        preexec=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert done.returncode in (1, 2)
    [refusal] = told(done.stderr)
    assert "memory" in refusal
    assert f"{mebibytes:,} MiB" in refusal
    assert "ulimit -v" in refusal


@pytest.mark.parametrize("flag", ["--kv-cache-memory", "--swap-space"])
def test_a_size_beyond_the_machine(flag: str) -> None:
    done = serve(flag, "900T")
    assert done.returncode == 2
    [refusal] = told(done.stderr)
    assert refusal.startswith(
        f"legato: {flag} is 921,600.00 GiB, but this process can have at most "
    )


def test_a_size_beyond_use_is_said_by_health(tmp_path: Path) -> None:
    flags = ("--kv-cache-memory", "256MiB", "--max-model-len", "256", "--max-num-seqs", "2")
    with running_server(tmp_path, *flags) as server:
        told = httpx.get(f"{server.url}/health").json()
        assert told["status"] == "ok"
        assert told["cut_sizes"]["--kv-cache-memory"].startswith("0.01 GiB of 0.25 GiB are taken")
        assert "--kv-cache-memory is cut: 0.01 GiB of 0.25 GiB" in server.log.read_text()
