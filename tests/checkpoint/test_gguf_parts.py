"""GGUF models in several files: parts of one, and the files of projectors beside it."""

import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from transformers import LlamaConfig, LlamaForCausalLM

from legato.api.download import may_download
from legato.checkpoint.gguf import _transformers_name
from legato.checkpoint.gguf_file import GGUFFile
from legato.checkpoint.hub import _headers
from legato.checkpoint.loader import open_checkpoint
from legato.checkpoint.source import ModelSource, resolve_source
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from tests.model.conftest import TINY, load

from .test_gguf import gguf_name, gguf_rows, gguf_writer

PARTS = 4


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model in parts, as llama.cpp's tools write them."""
    folder = tmp_path_factory.mktemp("parts")
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    state = model.state_dict()
    writer = gguf_writer(folder / "tiny-Q8_0.gguf", "llama", model.config)
    writer.split_max_tensors = -(-len(state) // PARTS)
    for name, tensor in state.items():
        writer.add_tensor(gguf_name(name), gguf_rows(name, tensor, "llama", model.config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = sorted(folder.iterdir())
    assert [path.name for path in found] == [
        f"tiny-Q8_0-0000{i}-of-00004.gguf" for i in range(1, 5)
    ]
    return found


@pytest.fixture
def copies(parts: list[Path], tmp_path: Path) -> list[Path]:
    return [Path(shutil.copy(path, tmp_path)) for path in parts]


def test_any_part_names_the_model(parts: list[Path]) -> None:
    for named in (*parts, parts[0].parent):
        assert resolve_source(str(named)).path == parts[0]
    stored: dict[str, np.ndarray] = {}
    for path in parts:
        stored |= {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    file = GGUFFile(parts[0])
    assert file.tensors.keys() == stored.keys()
    assert all(np.array_equal(file.read(name), values) for name, values in stored.items())
    file.release()
    checkpoint = open_checkpoint(ModelConfig(model=str(parts[2])))
    assert checkpoint.shapes.keys() == {_transformers_name(name) for name in stored}
    load(parts[3])


def test_missing_parts_are_named(copies: list[Path]) -> None:
    copies[1].unlink()
    copies[3].unlink()
    with pytest.raises(ConfigError, match=r"lacks tiny-Q8_0-00002-of-00004.gguf, tiny-Q8_0-00004"):
        resolve_source(str(copies[2]))
    with pytest.raises(
        UnsupportedModelError, match=r"lacks its part tiny-Q8_0-00002-of-00004.gguf"
    ):
        GGUFFile(copies[0])


def test_few_of_many_missing_parts_are_named(tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-99999.gguf"
    first.touch()
    with pytest.raises(ConfigError, match=r"00006-of-99999\.gguf and 99993 more: ") as refused:
        resolve_source(str(first))
    assert len(str(refused.value)) < 1000


def test_a_file_that_is_one_of_no_parts_is_a_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00000.gguf"
    path.touch()
    assert resolve_source(str(path)).path == path


@pytest.mark.parametrize("count", ["two", [1, 2], 1.0])
def test_a_count_of_parts_that_is_no_number_is_refused(tmp_path: Path, count: object) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    kinds = {str: writer.add_string, list: writer.add_array, float: writer.add_float64}
    kinds[type(count)]("split.count", count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"split\.count is"):
        GGUFFile(tmp_path / "m.gguf")


def test_a_part_under_another_name_is_refused(copies: list[Path]) -> None:
    alone = copies[0].rename(copies[0].with_name("tiny.gguf"))
    with pytest.raises(
        UnsupportedModelError, match=r"split\.count is 4, but by its name it is one of 1"
    ):
        GGUFFile(alone)
    shutil.copy(copies[1], copies[2])
    alone.rename(copies[0])
    with pytest.raises(UnsupportedModelError, match=r"00003.*are \(1, 4\) instead of \(2, 4\)"):
        GGUFFile(copies[0])


def test_parts_of_another_split_are_refused(copies: list[Path]) -> None:
    """Three of the four, under names of three."""
    for i, path in enumerate(copies[:3]):
        path.rename(path.with_name(f"m-0000{i + 1}-of-00003.gguf"))
    with pytest.raises(
        UnsupportedModelError, match=r"split\.count is 4, but by its name .* one of 3"
    ):
        GGUFFile(copies[0].with_name("m-00001-of-00003.gguf"))


def write(path: Path, architecture: str, *tensors: str) -> Path:
    writer = GGUFWriter(path, architecture)
    for name in tensors:
        writer.add_tensor(name, np.ones((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_projector_is_no_model(tmp_path: Path) -> None:
    path = write(tmp_path / "mmproj-F16.gguf", "clip", "v.blk.0.attn_q.weight")
    for named in (path, tmp_path):
        with pytest.raises(
            UnsupportedModelError, match=r"mmproj-F16\.gguf holds a projector .*mmproj"
        ):
            open_checkpoint(ModelConfig(model=str(named)))


def test_files_beside_a_model_are_named_and_left_out(copies: list[Path]) -> None:
    folder = copies[0].parent
    names = ["gemma-mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj_f16.gguf", "mtp-tiny.gguf"]
    for name in names:
        write(folder / name, "clip", "v.blk.0.attn_q.weight")
    assert resolve_source(str(folder)).path == copies[0]
    assert list(open_checkpoint(ModelConfig(model=str(folder))).unused) == names


HUB = [
    "config.json",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-bf16.gguf",
    "m-f16.gguf",
    "mmproj-m-f16.gguf",
    "Q8_0/m-Q8_0-00001-of-00002.gguf",
    "Q8_0/m-Q8_0-00002-of-00002.gguf",
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub with one repository of GGUF files; its folder has the files that were downloaded."""
    folder = tmp_path / "snapshot"

    def download(_: str, allow_patterns: list[str], ignore_patterns: list[str], **__: Any) -> str:
        chosen = filter_repo_objects(
            HUB, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for name in chosen:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        folder.mkdir(exist_ok=True)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: HUB)
    return folder


@pytest.mark.parametrize(
    ("tag", "chosen", "downloaded"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf", ["m-Q4_K_M.gguf"]),
        ("q4_k_s", "m-Q4_K_S.gguf", ["m-Q4_K_S.gguf"]),
        ("F16", "m-f16.gguf", ["m-f16.gguf"]),
        ("Q8_0", HUB[6], HUB[6:]),
    ],
)
def test_a_gguf_file_of_the_hub(tag: str, chosen: str, downloaded: list[str], hub: Path) -> None:
    assert resolve_source(f"org/m:{tag}") == ModelSource(hub / chosen)
    found = sorted(str(path.relative_to(hub)) for path in hub.rglob("*.*"))
    assert found == downloaded


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("model", ["org/m", "org/m:Q5_K_M"])
def test_the_gguf_files_of_the_hub_are_suggested(model: str) -> None:
    names = re.escape(
        "org/m:Q8_0. It has m-Q8_0.gguf, m-Q4_K_M.gguf, m-Q4_K_S.gguf, m-bf16.gguf, m-f16.gguf"
    )
    with pytest.raises(ConfigError, match=names):
        resolve_source(model)


@pytest.mark.parametrize("name", ["m-imat-Q4_K_M.gguf", "old/m-Q4_K_M.gguf"])
def test_a_tag_of_several_files_downloads_none(
    name: str, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: [*HUB, name])
    with pytest.raises(ConfigError, match="has several GGUF files for Q4_K_M") as refused:
        resolve_source("org/m:Q4_K_M")
    assert name in str(refused.value)
    assert not hub.exists()


def test_without_a_network_a_tag_is_of_the_files_downloaded_before(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ConnectionResetError("no network")

    expected = resolve_source("org/m:Q4_K_M")
    monkeypatch.setattr(huggingface_hub, "list_repo_files", broken)
    asked: list[list[str]] = []

    def kept(_: str, allow_patterns: list[str], **__: object) -> str:
        # The client refuses a folder that lacks some of the files that it is asked for.
        asked.append(allow_patterns)
        return str(hub)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", kept)
    assert resolve_source("org/m:Q4_K_M") == expected
    assert asked == [[], ["m-Q4_K_M.gguf"]]
    with pytest.raises(ConfigError, match="has no GGUF file whose name ends in Q8_0"):
        resolve_source("org/m:Q8_0")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("kind", [GatedRepoError, RepositoryNotFoundError])
@pytest.mark.parametrize("model", ["org/m", "org/m:Q8_0"])
def test_a_refusal_of_the_hub_names_the_token(
    model: str, kind: type[HfHubHTTPError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        request = httpx.Request("GET", "http://hub/api/models/org/m")
        raise kind("no", response=httpx.Response(401, request=request))

    for name in ("list_repo_files", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, name, refuse)
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        resolve_source(model)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("kind", [HfHubHTTPError.__mro__[1], RuntimeError, ConnectionResetError])
def test_a_connection_that_breaks_is_told(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise kind("the connection broke")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", broken)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", broken)
    for model in ("org/m", "org/m:Q8_0"):
        with pytest.raises(ConfigError, match="the connection broke"):
            resolve_source(model)
    with pytest.raises(ConfigError, match="the connection broke"):
        _headers(ModelConfig(model="org/m"))


def test_a_server_that_may_download_a_gguf_file_answers_probes_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "m:Q8_0").mkdir()
    for model, may in {
        "org/m": True,
        "org/m:Q8_0": True,
        str(tmp_path / "m:Q8_0"): False,
        "m.gguf": False,
    }.items():
        assert may_download(ModelConfig(model=model)) == may
        assert may_download(ModelConfig(tokenizer=model)) == may
