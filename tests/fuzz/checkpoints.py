"""Tiny checkpoints, broken in headers or weights: they are refused, or they load and compute."""

import json
import math
import random
import resource
import shutil
import struct
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from legato.checkpoint.defaults import load_defaults
from legato.checkpoint.loader import load_model, open_checkpoint
from legato.checkpoint.source import ModelSource
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.first_pass import check_forward
from legato.language.tokenizer.tokenizer import load_tokenizer
from tests.checkpoint.test_gguf import write_gguf
from tests.fuzz.bodies import mutated
from tests.language.test_tokenizer import byte_level_metadata

_CONFIG = LlamaConfig(
    vocab_size=264, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
)  # fmt: skip
MAX_BYTES = 64 * 2**20
"""That a broken header may make Python and NumPy take; the checkpoints are a thousandth of it."""
_ROOM_BYTES = 2 * 2**30
_NUMBERS = [0, 1, 2, 3, 31, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63, 2**64 - 1]
_VALUES: list[Any] = [
    *_NUMBERS, -1, 1.5, 1e308, True, None, "", "x", "../x", [], [1], {}, {"a": 1}, "x" * 5000,
]  # fmt: skip


@contextmanager
def memory_limit(room_bytes: int = _ROOM_BYTES) -> Iterator[None]:
    """Let no allocation take what a hostile header asks for."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + room_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


class Seeds:
    """The checkpoints that are broken, whole, in a folder of their own.

    Attributes:
        gguf: a file.
        folder: in transformers' format.
    """

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_CONFIG, dtype=torch.float32)
        self.folder = folder / "hf"
        model.save_pretrained(self.folder)
        self.gguf = folder / "model.gguf"
        write_gguf(self.gguf, "llama", model, add_tokenizer=_add_tokenizer)
        load_tokenizer(ModelSource(self.gguf)).pretrained.save_pretrained(self.folder)


def load(path: Path) -> None:
    """Everything that the two processes of a server do with a checkpoint when they start."""
    source = ModelSource(path)
    load_defaults(source, load_tokenizer(source).eos_token_id)
    checkpoint = open_checkpoint(ModelConfig(model=str(path)))
    spec, device = checkpoint.spec, torch.device("cpu")
    model = load_model(checkpoint, dtype=torch.float32, device=device)
    attention = TorchAttentionBackend(model.cache, num_blocks=1, block_size=32, device=device)
    sizes = {"vocab_size": spec.vocab_size, "max_len": spec.max_model_len}
    check_forward(model, attention, block_size=32, **sizes)


def break_gguf(seeds: Seeds, rng: random.Random, folder: Path) -> Path:
    data = bytearray(seeds.gguf.read_bytes())
    num_header_bytes = len(data) * 3 // 4 if rng.random() < 0.1 else 8000
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(num_header_bytes)
        code = rng.choice("BIQ")
        limit = 2 ** (8 * struct.calcsize(f"<{code}"))
        struct.pack_into(f"<{code}", data, at, rng.choice(_NUMBERS) % limit)
    if rng.random() < 0.1:
        data = bytearray(mutated(rng, bytes(data)))
    path = folder / "broken.gguf"
    path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
    return path


def break_folder(seeds: Seeds, rng: random.Random, folder: Path) -> Path:
    """Break one of its files: a value of JSON, or bytes."""
    path = folder / "broken"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(seeds.folder, path)
    file = rng.choice([path / "model.safetensors", *path.glob("*.json")])
    data = file.read_bytes()
    if file.suffix == ".json" and rng.random() < 0.7:
        contents = json.loads(data)
        _change(rng, contents)
        file.write_text(json.dumps(contents))
    elif file.suffix == ".json":
        file.write_bytes(mutated(rng, data))
    else:
        file.write_bytes(_broken_safetensors(rng, data))
    return path


def damage_weights(seeds: Seeds, rng: random.Random, folder: Path) -> Path:
    """Make one weight no number, in either format; no server may serve it."""
    bad = rng.choice([math.nan, math.inf, -math.inf])
    if rng.random() < 0.5:
        path = folder / "damaged.gguf"
        shutil.copy(seeds.gguf, path)
        weights = rng.choice(GGUFReader(path, "r+").tensors).data.reshape(-1)
        weights[rng.randrange(len(weights))] = bad
        return path
    path = folder / "damaged"
    shutil.copytree(seeds.folder, path, dirs_exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    values = tensors[rng.choice(sorted(tensors))].flatten()
    values[rng.randrange(len(values))] = bad
    save_file(tensors, path / "model.safetensors")
    return path


def _broken_safetensors(rng: random.Random, data: bytes) -> bytes:
    (num_header_bytes,) = struct.unpack_from("<Q", data)
    header, rest = data[8 : 8 + num_header_bytes], data[8 + num_header_bytes :]
    kind = rng.random()
    if kind < 0.2:
        return struct.pack("<Q", rng.choice(_NUMBERS)) + header + rest
    if kind < 0.4:
        header = mutated(rng, header)
    else:
        contents = json.loads(header)
        _change(rng, contents)
        header = json.dumps(contents).encode()
    return struct.pack("<Q", len(header)) + header + (rest if kind < 0.9 else rest[:100])


def _change(rng: random.Random, contents: Any) -> None:
    """Replace one value somewhere in it."""
    while True:
        keys = list(contents) if isinstance(contents, dict) else list(range(len(contents)))
        if not keys:
            return
        key = rng.choice(keys)
        inner = contents[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.3:
            contents[key] = rng.choice(_VALUES)
            return
        contents = inner


def try_one(seeds: Seeds, rng: random.Random, folder: Path) -> Counter[str]:
    """Break a checkpoint and load it.

    Returns:
        Key what came of it.

    Raises:
        Exception: any but the refusals that a user gets to see.
        AssertionError: it took too much memory, or was loaded though its weights are no numbers.
    """
    break_it = rng.choice([break_gguf, break_folder, damage_weights])
    path = break_it(seeds, rng, folder)
    tracemalloc.start()
    try:
        load(path)
        outcome = "loaded"
    except (UnsupportedModelError, ConfigError):
        outcome = "refused"
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert outcome == "refused" or break_it is not damage_weights, path
    assert peak_bytes < MAX_BYTES, f"{peak_bytes} bytes were taken"
    return Counter([f"{break_it.__name__} {outcome}"])


def _add_tokenizer(writer: GGUFWriter) -> None:
    metadata = byte_level_metadata("gpt-2")
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
