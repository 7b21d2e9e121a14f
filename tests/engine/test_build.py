"""What putting an engine together loads, leaves to the front end, and takes of the machine."""

import hashlib
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from legato.core.config import EngineConfig
from legato.core.errors import ConfigError
from legato.engine.build import blueprint, builder, runtime
from legato.engine.build.builder import build_engine, load_runtime
from legato.model.native_kernels import NativeKernels, kernels_digest, native_instructions
from tests.checkpoint.test_dummy import described
from tests.model.conftest import TINY

BUILD = """
import importlib
import sys
from legato.core.config import CacheConfig, EngineConfig, ModelConfig
from legato.engine import main
from legato.engine.build.builder import build_engine

build_engine(EngineConfig(
    model=ModelConfig(max_model_len=64), cache=CacheConfig(kv_cache_memory_bytes=2**24)
))
# The package `tokenizers` itself comes with transformers' configurations.
names = ("legato.language.tokenizer.tokenizer", "legato.language.tokenizer.gguf_tokenizer",
         "transformers.tokenization_utils_tokenizers")
print(*(name for name in names if name in sys.modules))
for name in names:
    importlib.import_module(name)  # or the names above mean nothing
"""


def test_the_engine_process_loads_no_tokenizer() -> None:
    found = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []


SMALL: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 2, "num_threads": 1}
FULL_BYTES = 2 * 256 * 23_040
"""Size of the cache that running requests can fill."""


@pytest.fixture(autouse=True)
def _threads() -> Any:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("flag", ["--kv-cache-memory", "--swap-space"])
def test_memory_that_no_machine_has_is_refused_by_name(flag: str) -> None:
    name = {"--kv-cache-memory": "kv_cache_memory_bytes", "--swap-space": "swap_space_bytes"}[flag]
    told = rf"{flag} is 921,600\.00 GiB, but this process can have at most [0-9,.]+ GiB of memory$"
    with pytest.raises(ConfigError, match=told):
        build_engine(EngineConfig.of(**SMALL, **{name: 900 * 2**40}))


def test_a_cache_larger_than_requests_can_fill_is_cut_aloud(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING"):
        _, info = build_engine(EngineConfig.of(**SMALL, kv_cache_memory_bytes=2**28))
    taken = f"{FULL_BYTES / 2**30:.2f} GiB of 0.25 GiB are taken, since 2 running requests"
    assert info.cut_sizes["--kv-cache-memory"].startswith(taken)
    assert f"--kv-cache-memory is cut: {taken}" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_memory_bytes": 2**23},
        {"kv_cache_memory_bytes": FULL_BYTES},
        {"kv_cache_memory_bytes": FULL_BYTES + 32 * 23_040 - 1},
        {},
    ],
)
def test_a_cache_that_is_not_cut(settings: dict[str, Any]) -> None:
    _, info = build_engine(EngineConfig.of(**SMALL, **settings))
    assert info.cut_sizes == {}


def test_threads_follow_the_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    for module in (blueprint, builder):
        monkeypatch.setattr(module, "usable_cores", lambda: 4)
    assert blueprint._num_threads(EngineConfig.of().model) == 4
    assert blueprint._num_threads(EngineConfig.of(num_threads=6).model) == 6
    assert builder._threads(4).startswith("4, on 4 of ")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert blueprint._num_threads(EngineConfig.of().model) == 2


def test_an_engine_runs_on_the_cores_of_its_affinity() -> None:
    """A process that may use one core alone, though PyTorch was given more."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "import torch; torch.set_num_threads(8)\n"
        "from legato.core.config import EngineConfig\n"
        "from legato.engine.build.builder import build_engine\n"
        "_, info = build_engine(EngineConfig.of(max_model_len=64, kv_cache_memory_bytes=2**24))\n"
        "print(info.settings['threads']); print(torch.get_num_threads())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    told, count = found.stdout.splitlines()
    assert told.startswith("1, on 1 of ")
    assert count == "1"


def test_the_table_at_the_start_says_how_weights_are_held(tmp_path: Path) -> None:
    held: dict[str, str] = {}
    calibrations = set()
    for name, settings in {"": {}, "none": {"quantization": "none"}}.items():
        loaded = load_runtime(
            EngineConfig.of(
                **SMALL,
                **settings,
                kv_cache_memory_bytes=2**23,
                calibration_dir=str(tmp_path),
            )
        )
        held[name] = builder._describe(loaded).settings["weights"]
        calibrations.add(loaded.step_times.file.path)
    packed = "as in the file" if native_instructions() else "widened to bfloat16"
    assert held == {"": f"Q4_1, Q8_0, {packed}", "none": "Q4_1, Q8_0, widened to bfloat16"}
    assert len(calibrations) == (2 if native_instructions() else 1)


def test_a_calibration_is_found_again_in_another_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = load_runtime(
        EngineConfig.of(**SMALL, kv_cache_memory_bytes=2**23, calibration_dir=str(tmp_path))
    )
    paths = set()
    for node in ("3f1c9d0a77aa", "b80d2e51c0ff"):
        monkeypatch.setattr(platform, "node", lambda node=node: node)
        paths.add(loaded.step_times.file.path)
        assert node not in str(loaded.step_times.file.about)
    assert len(paths) == 1
    monkeypatch.setattr(runtime, "usable_cores", lambda: 4096)
    assert loaded.step_times.file.path not in paths
    monkeypatch.undo()
    monkeypatch.setattr(runtime, "kernels_digest", lambda _: "others")
    assert loaded.step_times.file.path not in paths
    monkeypatch.undo()
    for quota in (0.5, 0.25):
        monkeypatch.setattr(runtime, "cgroup_cores", lambda quota=quota: quota)
        assert loaded.step_times.file.path not in paths
        paths.add(loaded.step_times.file.path)


def test_a_calibration_tells_how_long_its_contexts_could_be(tmp_path: Path) -> None:
    """A small cache has measured short contexts alone. Others need not agree to the block."""
    paths = [
        load_runtime(
            EngineConfig.of(
                model=str(described(tmp_path / "model", LlamaConfig(**TINY))),
                load_format="dummy",
                **SMALL | {"max_model_len": max_model_len},
                kv_cache_memory_bytes=2**22,
                calibration_dir=str(tmp_path),
            )
        ).step_times.file.path
        for max_model_len in (128, 200, 256)
    ]
    assert paths[0] == paths[1] != paths[2]


X86 = """processor\t: {core}
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: {model}
model name\t: AMD EPYC
cpu MHz\t\t: {mhz}

"""
ARM = """processor\t: {core}
BogoMIPS\t: {mhz}
CPU implementer\t: 0x41
CPU variant\t: 0x3
CPU part\t: {model}

"""


@pytest.mark.parametrize("kind", [X86, ARM], ids=["x86", "ARM"])
def test_processors_of_another_generation_have_another_name(kind: str, tmp_path: Path) -> None:
    def name(*models: str, mhz: str = "2000") -> str:
        text = "".join(kind.format(core=i, model=m, mhz=mhz) for i, m in enumerate(models))
        (tmp_path / "cpuinfo").write_text(text)
        return runtime._processor_name(tmp_path / "cpuinfo")

    assert name("1", "1") == name("1", "1", "1", mhz="2500") != name("17", "17")
    assert name("1", "17") not in (name("1", "1"), name("17", "17"))
    assert runtime._processor_name(tmp_path / "no such file")


@pytest.mark.skipif(not native_instructions(), reason="no native kernels run here")
def test_the_digest_of_kernels_is_their_files() -> None:
    name = native_instructions()[0]
    contents = Path(NativeKernels(1, name).extension.__file__).read_bytes()
    assert kernels_digest(name) == hashlib.sha256(contents).hexdigest()[:16]
    assert kernels_digest("torch") == "none"
