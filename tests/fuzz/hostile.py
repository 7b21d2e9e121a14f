"""Files that are well-formed, but ask for much: lengths, offsets, overlaps, counts and depth.

Beside `tests.fuzz.checkpoints`, which breaks bytes and single values. Each file is small, and so is
the memory that it may take.
"""

import json
import random
import shutil
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.formats.hub_copy import save_quantized
from benchmarks.formats.hub_writers import FORMATS
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from legato.checkpoint.dummy import open_dummy_checkpoint
from legato.checkpoint.source import ModelSource
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from tests.families.tiny import MODELS
from tests.fuzz.bodies import mutated
from tests.fuzz.checkpoints import MAX_BYTES, Seeds, load

ROOM_BYTES = 2**29
_HUGE = (0, 1, 2, 2**8, 2**10, 2**16, 2**20, 2**26, 2**30, 2**31 - 1, 2**32, 2**40, 2**62, 2**63)
_SIZES: list[Any] = [*_HUGE, -1, -(2**31), True, 0.5, "x", [], [0, 0], [2**20, 1], [2**26, 32]]
_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "I32", "I8", "U8", "BOOL", "F4", "x")
_SIZE_NAMES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "moe_intermediate_size",
    "sliding_window", "layer_types", "num_experts", "num_local_experts", "n_routed_experts",
    "num_experts_per_tok", "n_group", "topk_group", "kv_lora_rank", "q_lora_rank", "conv_L_cache",
)  # fmt: skip
_MOST_DEPTH = 20_000

Breaker = Callable[["HostileSeeds", random.Random, Path], Path]


class HostileSeeds(Seeds):
    """Attributes: quantized: a folder in each format of quantized matrices."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        torch.manual_seed(0)
        sizes = {"vocab_size": 264, "hidden_size": 128, "intermediate_size": 256}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64)).eval()
        self.quantized = [folder / f"quantized {index}" for index in range(len(FORMATS))]
        for path, form in zip(self.quantized, FORMATS.values(), strict=True):
            save_quantized(model, path, form)
            _copy_tokenizer(self.folder, path)
        self.families = [_contents(tiny.config()) for tiny in MODELS.values()]


def claim_in_gguf(seeds: HostileSeeds, rng: random.Random, folder: Path) -> Path:
    """Set lengths, counts, dimensions, types and offsets, sometimes to those of another tensor."""
    data = bytearray(seeds.gguf.read_bytes())
    reader = GGUFReader(seeds.gguf)
    fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
    places: list[tuple[int, Any]] = [(8, struct.Struct("<Q")), (16, struct.Struct("<Q"))]
    offsets: list[int] = []
    for field in fields:
        position = int(field.offset)
        for part in field.parts:
            if part.dtype.kind in "ui" and part.dtype.itemsize > 1:
                code = struct.Struct({4: "<I", 8: "<Q", 2: "<H"}[part.dtype.itemsize])
                places += [(position + code.size * i, code) for i in range(len(part))][:4]
            position += part.nbytes
        offsets.append(position - 8)
    for _ in range(rng.randrange(1, 4)):
        at, code = rng.choice(places)
        other = struct.unpack_from("<Q", data, rng.choice(offsets))[0]
        number = rng.choice([*_HUGE, other, other + 32])
        code.pack_into(data, at, number % 256**code.size)
    path = folder / "claims.gguf"
    path.write_bytes(data)
    return path


def claim_in_safetensors(seeds: HostileSeeds, rng: random.Random, folder: Path) -> Path:
    """Change shapes, types and offsets in a header, plain or quantized; add many tensors."""
    source = rng.choice([seeds.folder, *seeds.quantized])
    path = _copied(source, folder)
    file = path / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    for _ in range(rng.randrange(1, 4)):
        tensor = header[rng.choice(names)]
        kind = rng.randrange(6)
        if kind == 0:
            tensor["shape"] = rng.choices(_HUGE, k=rng.randrange(5))
        elif kind == 1:
            tensor["data_offsets"] = rng.choices([*_HUGE, len(rest)], k=2)
        elif kind == 2:
            tensor["data_offsets"] = header[rng.choice(names)]["data_offsets"]
        elif kind == 3:
            tensor["dtype"] = rng.choice(_DTYPES)
        elif kind == 4 and len(tensor["shape"]) > 1:
            tensor["shape"] = tensor["shape"][::-1]
        else:
            empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            header |= {f"empty.{i}": empty for i in range(rng.choice([1, 100, 10_000]))}
    text = json.dumps(header).encode()
    if rng.random() < 0.1:
        text = b"[" * rng.randrange(_MOST_DEPTH) + text
    file.write_bytes(struct.pack("<Q", rng.choice([len(text)] * 9 + [*_HUGE])) + text + rest)
    return path


def claim_in_quantization(seeds: HostileSeeds, rng: random.Random, folder: Path) -> Path:
    """Change a quantization_config, or bitsandbytes' JSON beside a matrix."""
    path = _copied(rng.choice(seeds.quantized), folder)
    tensors = load_file(path / "model.safetensors")
    states = [name for name in tensors if "quant_state" in name]
    if states and rng.random() < 0.7:
        name = rng.choice(states)
        state = json.loads(bytes(tensors[name].tolist()))
        state[rng.choice([*state, "nested_blocksize", "shape"])] = rng.choice(_SIZES)
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        save_file(tensors, path / "model.safetensors")
        return path
    config = json.loads((path / "config.json").read_text())
    own: Any = config["quantization_config"]
    while True:
        key = rng.choice([*own, *_EXTRA])
        if isinstance(own.get(key), dict) and own[key] and rng.random() < 0.8:
            own = own[key]
            continue
        own[key] = rng.choice(
            [*_SIZES, *[list(pair) for pair in zip(_HUGE, reversed(_HUGE), strict=True)]]
        )
        break
    (path / "config.json").write_text(json.dumps(config))
    return path


_EXTRA = ("weight_block_size", "block_structure", "group_size", "num_bits", "strategy", "bits")


def claim_in_config(seeds: HostileSeeds, rng: random.Random, folder: Path) -> Path:
    """Change the sizes of any family; its weights are those of another model."""
    path = _copied(seeds.folder, folder)
    config = dict(rng.choice(seeds.families))
    for name in rng.sample(_SIZE_NAMES, rng.randrange(1, 6)):
        if name in config or rng.random() < 0.2:
            config[name] = rng.choice([*_SIZES, 1024, 1024])
    (path / "config.json").write_text(json.dumps(config))
    if rng.random() < 0.5:
        # Without comparing anything with the file, as for dummy weights.
        open_dummy_checkpoint(ModelConfig(model=str(path), load_format="dummy"), ModelSource(path))
    return path


def claim_in_tokenizer(seeds: HostileSeeds, rng: random.Random, folder: Path) -> Path:
    """Change ids, merges and added tokens; nest its steps deeply, or in a circle of names."""
    path = _copied(seeds.folder, folder)
    file = path / "tokenizer.json"
    contents = json.loads(file.read_text())
    model = contents["model"]
    for _ in range(rng.randrange(1, 3)):
        if not isinstance(model.get("vocab"), dict):
            break  # the first change took it
        kind = rng.randrange(7)
        if kind == 0:
            model["vocab"][rng.choice(list(model["vocab"]))] = rng.choice(_SIZES)
        elif kind == 1 and isinstance(model.get("merges"), list):
            texts = list(model["vocab"])
            model["merges"] += [[rng.choice(texts), rng.choice(texts)] for _ in range(1000)]
        elif kind == 2:
            model["vocab"] |= {f"more {i}": rng.choice([i, 2**20 + i]) for i in range(2000)}
        elif kind == 3:
            added = {"id": rng.choice(_SIZES), "content": rng.choice(["", "x", "x" * 1000])}
            flags = dict.fromkeys(
                ["single_word", "lstrip", "rstrip", "normalized", "special"], True
            )
            contents["added_tokens"] = [added | flags] * rng.choice([1, 2, 1000])
        elif kind == 4:
            part = rng.choice(["normalizer", "pre_tokenizer", "decoder", "post_processor"])
            key = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}.get(part, part)
            nested: Any = {"type": "Sequence", key: []}
            for _ in range(rng.choice([10, 100, 400])):
                nested = {"type": "Sequence", key: [nested]}
            contents[part] = nested
        elif kind == 5:
            special: dict[str, Any] = {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x"}}] * 9,
            }
            token = {"id": "x", "ids": [rng.choice(_HUGE)], "tokens": ["x"]}
            special |= {"pair": [], "special_tokens": {"x": token}}
            contents["post_processor"] = special
        else:
            model[rng.choice([*model])] = rng.choice(_SIZES)
    text = json.dumps(contents).encode()
    file.write_bytes(mutated(rng, text) if rng.random() < 0.1 else text)
    return path


BREAKERS: list[Breaker] = [
    claim_in_gguf,
    claim_in_safetensors,
    claim_in_quantization,
    claim_in_config,
    claim_in_tokenizer,
]


def try_hostile(seeds: HostileSeeds, rng: random.Random, folder: Path) -> Counter[str]:
    """Write a hostile file and load it; the caller has limited the memory.

    Returns:
        Key what came of it.

    Raises:
        Exception: any but the refusals that a user gets to see.
        AssertionError: it took too much of Python's and NumPy's memory.
    """
    break_it = rng.choice(BREAKERS)
    tracemalloc.start()
    try:
        load(break_it(seeds, rng, folder))
        outcome = "loaded"
    except (UnsupportedModelError, ConfigError):
        outcome = "refused"
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < MAX_BYTES, f"{peak_bytes} bytes were taken"
    return Counter([f"{break_it.__name__} {outcome}"])


def _copied(source: Path, folder: Path) -> Path:
    path = folder / "hostile"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(source, path)
    return path


def _copy_tokenizer(source: Path, path: Path) -> None:
    for file in source.glob("*token*.json"):
        shutil.copy(file, path)


def _contents(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the config.json of a model with this configuration."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return config.to_dict() | ({} if kind is None else {"architectures": [kind.__name__]})
