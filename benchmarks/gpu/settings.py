"""What the parts measure, and on what."""

import json
from pathlib import Path
from typing import Any

import msgspec
import torch

from legato.checkpoint.loader import open_checkpoint
from legato.core.config import EngineConfig
from legato_lab.simulation.workload import RandomPrompts

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
"""Its config.json, as far as Legato reads it."""

SHAPE = "llama-3.1-8b"


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything; all lengths are in tokens.

    Attributes:
        streams: that decode at once.
        context: of each of them.
        decoded: number of steps; their median counts.
        prompt: a long one.
        chunks: that it is computed in.
        mixed: chunks beside `mixed_streams`, at position `mixed_start`. Beside 128 streams, 1,920
            tokens make 2,048 rows: whole waves of products, and the largest graph.
        quantized: streams of the parts with quantized weights.
        has_variants: whether decodes are also measured with one step in flight, and sampled.
        max_model_len: the longest prompt and all that follows it.
        probe_streams, probe_s: that decode while long prompts come for so long.
        probe_longs: prompts that come at once to a server.
        vllm_chunks: chunk sizes of vLLM.
        probe_tokens: that each of them may come to: more than it will.
        batch: (requests, prompt, output) of the offline runs.
        matrix: of a large product, and `vector_bytes` of a large copy.
    """

    streams: tuple[int, ...] = (1, 32, 128, 256)
    context: int = 1024
    decoded: int = 30
    prompt: int = 8192
    chunks: tuple[int, ...] = (8192, 2048)
    mixed: tuple[int, ...] = (128, 512, 1920, 2048)
    mixed_streams: int = 128
    mixed_start: int = 4096
    quantized: tuple[int, ...] = (1, 32, 128, 256)
    has_variants: bool = True
    max_model_len: int = 16_384
    probe_streams: int = 32
    probe_s: float = 20.0
    probe_longs: int = 8
    vllm_chunks: tuple[int, ...] = (2048, 512, 8192)
    probe_tokens: int = 4096
    batch: tuple[int, int, int] = (256, 512, 128)
    matrix: int = 8192
    vector_bytes: int = 4 * 2**30


QUICK_SIZES = Sizes(
    decoded=20,
    chunks=(8192,),
    mixed=(128, 512, 1920),
    quantized=(128,),
    has_variants=False,
    probe_s=10.0,
)
"""What three minutes have room for."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    out: folder of the figures.
    itl_slo_s: that the probe asks for; None asks for no promise.
    vllm: command before `serve`.
    """

    model: str
    out: str
    device: str = "cuda"
    itl_slo_s: float | None = 0.025
    vllm: tuple[str, ...] = ("vllm",)
    sizes: Sizes = Sizes()

    def figures_file(self, part: str) -> Path:
        return Path(self.out) / f"{part}.json"

    def engine(self, **changes: Any) -> EngineConfig:
        """Of dummy weights of the model's shape."""
        sizes = self.sizes
        settings = {
            "model": self.model,
            "load_format": "dummy",
            "device": self.device,
            "max_model_len": sizes.max_model_len,
            "max_num_seqs": max(*sizes.streams, sizes.mixed_streams + 1),
            "max_num_batched_tokens": max(sizes.chunks),
            "calibration_dir": str(Path(self.out) / "calibration"),
        }
        return EngineConfig.of(**(settings | changes))

    @property
    def prompts(self) -> RandomPrompts:
        """Of tokens that the model has."""
        return RandomPrompts(vocab_size=self.vocab_size, seed=0)

    @property
    def vocab_size(self) -> int:
        return open_checkpoint(self.engine().model).spec.vocab_size

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


def shape_folder(out: Path) -> Path:
    """A folder with the config.json of the default shape, and nothing else."""
    folder = out / SHAPE
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_3_1_8B, indent=2), encoding="utf-8")
    return folder
