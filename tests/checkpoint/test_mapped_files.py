"""A loaded model keeps no view of its files: one that is cut later would end the process."""

import ctypes
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from benchmarks.formats.hub_copy import save_quantized
from benchmarks.formats.hub_writers import FORMATS
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from legato.checkpoint.finite import check_finite
from legato.checkpoint.gguf_file import GGUFFile
from legato.checkpoint.loader import load_model, open_checkpoint
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL, ModelConfig, ModelImpl, Quantization
from legato.executor.sequences import Sequences
from legato.model.model import Model
from legato.model.native_kernels import NativeKernels, native_instructions
from legato.model.native_support import why_not_native
from tests.families.tiny import MODELS, random_model
from tests.model.conftest import TINY, SaveTiny

from .test_gguf import write_gguf

SIZES = TINY | {"hidden_size": 128, "intermediate_size": 256}


def is_mapped(folder: Path) -> bool:
    gc.collect()
    return str(folder) in Path("/proc/self/maps").read_text()


def loaded(
    path: Path,
    dtype: torch.dtype,
    *,
    is_native: bool = False,
    quantization: Quantization | None = None,
    model_impl: ModelImpl = "auto",
) -> Model:
    if is_native and not native_instructions():
        pytest.skip("no native kernels run here")
    config = ModelConfig(model=str(path), quantization=quantization, model_impl=model_impl)
    return load_model(
        open_checkpoint(config),
        dtype=dtype,
        device=torch.device("cpu"),
        kernels=NativeKernels(1, native_instructions()[0]) if is_native else None,
        quantization=quantization,
    )


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, attention_bias=True)).eval()


@pytest.mark.parametrize("model_impl", ["legato", "transformers"])
@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_of_plain_weights(
    model: PreTrainedModel,
    tmp_path: Path,
    stored: torch.dtype,
    model_impl: ModelImpl,
    is_native: bool,
) -> None:
    model.to(stored).save_pretrained(tmp_path)
    dtype = torch.bfloat16 if is_native else stored
    kept = loaded(tmp_path, dtype, is_native=is_native, model_impl=model_impl)
    assert not is_mapped(tmp_path)
    assert kept.num_weight_bytes > 0


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_of_quantized_weights(
    model: PreTrainedModel, tmp_path: Path, name: str, is_native: bool
) -> None:
    save_quantized(model, tmp_path, FORMATS[name])
    kept = loaded(tmp_path, torch.bfloat16, is_native=is_native)
    assert not is_mapped(tmp_path)
    assert kept.num_weight_bytes > 0


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("kind", [None, "BF16", "Q8_0", "Q4_1"])
def test_of_a_gguf_file(tmp_path: Path, kind: str | None, is_native: bool) -> None:
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    quantization = None if kind is None else GGMLQuantizationType[kind]
    write_gguf(tmp_path / "model.gguf", "llama", llama, quantization=quantization)
    kept = loaded(tmp_path / "model.gguf", torch.bfloat16, is_native=is_native, quantization="gguf")
    assert not is_mapped(tmp_path)
    assert kept.num_weight_bytes > 0


@pytest.mark.parametrize("kind", ["gguf", "hub"])
def test_pages_are_given_back_while_a_file_is_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"gguf": "gguf", "hub": "weight_files"}[kind]
    monkeypatch.setattr(f"legato.checkpoint.{module}._MAPPED_BYTES", 0)
    llama = AutoModelForCausalLM.from_config(
        LlamaConfig(**SIZES | {"num_hidden_layers": 12})
    ).eval()
    path = tmp_path / {"gguf": "model.gguf", "hub": "model.safetensors"}[kind]
    if kind == "gguf":
        write_gguf(path, "llama", llama, quantization=GGMLQuantizationType.Q8_0)
    else:
        llama.save_pretrained(tmp_path)
    model, quantization = (path, "gguf") if kind == "gguf" else (tmp_path, None)
    checkpoint = open_checkpoint(ModelConfig(model=str(model), quantization=quantization))
    most = 0
    for name, weight in checkpoint.tensors(torch.device("cpu")):
        check_finite(name, weight, torch.bfloat16)  # reads each page
        most = max(most, mapped_bytes(path))
    assert most < path.stat().st_size / 2


def test_a_file_larger_than_the_memory_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("a", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    os.truncate(path, 2 * memory)
    assert GGUFFile(path).read("a").sum() == 32


def test_pages_that_are_locked_stay() -> None:
    """As with all pages of a process that has called mlockall."""
    file = GGUFFile(resolve_source(DEFAULT_MODEL).path)
    name = min(file.tensors)
    before = file.read(name).copy()
    start = file.read_bytes(name).ctypes.data & -mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE)
    if libc.mlock(address, size):
        pytest.skip("no page can be locked here")
    try:
        file.release()
    finally:
        libc.munlock(address, size)
    assert (file.read(name) == before).all()


def mapped_bytes(path: Path) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    _, _, mapping = Path("/proc/self/smaps").read_text().partition(str(path))
    return 1024 * int(mapping.partition("Rss:")[2].split()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_of_each_family(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    random_model(MODELS[name]).to(dtype).save_pretrained(tmp_path)
    spec = open_checkpoint(ModelConfig(model=str(tmp_path))).spec
    is_native = not why_not_native(spec, torch.bfloat16, torch.device("cpu"))
    kept = loaded(tmp_path, torch.bfloat16 if is_native else dtype, is_native=is_native)
    assert not is_mapped(tmp_path)
    assert kept.num_weight_bytes > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_classification_head(tmp_path: Path, save_tiny: SaveTiny, dtype: torch.dtype) -> None:
    folder, _ = save_tiny(LlamaConfig(**TINY))
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = torch.ones(1, TINY["hidden_size"], dtype=dtype)
    save_file(tensors, folder / "model.safetensors")
    del tensors
    checkpoint = open_checkpoint(ModelConfig(model=str(folder)))
    assert checkpoint.read_head is not None
    sequences = Sequences(None, checkpoint.read_head())
    del checkpoint
    assert not is_mapped(tmp_path)
    assert sequences._score_head is not None
    assert sequences._score_head.sum() == TINY["hidden_size"]
