"""Phi-3 and Phi-4 in GGUF files: fused projections, and LongRoPE's factors as tensors."""

from typing import Any

from legato.checkpoint.gguf_architectures import GGUFArchitecture, common_config
from legato.checkpoint.gguf_file import GGUFFile


def _config(file: GGUFFile) -> dict[str, Any]:
    common = common_config(file)
    length = file.get("rope.scaling.original_context_length", common["max_position_embeddings"])
    return {
        **common,
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": length,
        # Phi-4, which has none, says 0.
        "sliding_window": file.get("attention.sliding_window") or None,
    }


PHI3 = {
    "phi3": GGUFArchitecture(_config, {"ffn_up": "mlp.gate_up_proj"}),
}
