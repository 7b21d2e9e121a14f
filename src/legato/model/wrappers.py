"""Classes with images or sounds, whose text model runs alone. Torch-free.

A class is one line in `WRAPPERS`. Its text model is described in a part of config.json (`PARTS`) or
at its top, its tensors have a prefix of `NAMES`, and all tensors of its other parts are left out.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

PARTS = ("text_config", "llm_config")
"""Keys of config.json that describe a text model."""
TIED = "tie_word_embeddings"
"""Of two of these keys, true goes first."""
OUTER = frozenset({"dtype", "torch_dtype", TIED, "quantization_config", "compression_config"})
"""Keys of a text model whose value outside its part goes first."""
_TOWER = "vision_tower multi_modal_projector"


class Wrapper(NamedTuple):
    """A class with images or sounds.

    Attributes:
        media: first parts of the names of the tensors that the text model does not have, as words.
        keys: defaults of the text model's description, where they differ from its family's.
        may_transpose_experts: stacked weights of experts, if they are not quantized, may be inputs
            by outputs.
    """

    media: str
    keys: Mapping[str, Any] = {}
    may_transpose_experts: bool = False

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Beginnings of the names of the tensors that the text model does not have."""
        return tuple(f"{outer}{part}." for outer in ("", "model.") for part in self.media.split())


WRAPPERS: Mapping[str, Wrapper] = {
    "Cohere2VisionForConditionalGeneration": Wrapper(_TOWER),
    "Gemma3ForConditionalGeneration": Wrapper(_TOWER),
    "Gemma4ForConditionalGeneration": Wrapper(
        f"{_TOWER} embed_vision audio_tower embed_audio vision_embedder"
    ),
    "Gemma4UnifiedForConditionalGeneration": Wrapper(
        f"{_TOWER} embed_vision audio_tower embed_audio vision_embedder"
    ),
    "Glm46VForConditionalGeneration": Wrapper("visual", {"head_dim": None}),
    "Glm4vForConditionalGeneration": Wrapper("visual", {"head_dim": None}),
    "Glm4vMoeForConditionalGeneration": Wrapper("visual", {"head_dim": None}),
    "GlmOcrForConditionalGeneration": Wrapper(
        "visual", {"attention_bias": False, "partial_rotary_factor": 1.0}
    ),
    "HunYuanVLForConditionalGeneration": Wrapper("vit vision_tower"),
    "Idefics3ForConditionalGeneration": Wrapper("vision_model connector"),
    "InternS1ForConditionalGeneration": Wrapper(_TOWER),
    "InternS2PreviewForConditionalGeneration": Wrapper("visual"),
    "InternVLChatModel": Wrapper("vision_model mlp1"),
    "InternVLForConditionalGeneration": Wrapper(_TOWER),
    "KimiK25ForConditionalGeneration": Wrapper("vision_tower mm_projector"),
    "KimiVLForConditionalGeneration": Wrapper(_TOWER),
    "Kimi_K25ForConditionalGeneration": Wrapper("vision_tower mm_projector"),
    "Lfm2VlForConditionalGeneration": Wrapper(_TOWER),
    "Llama4ForConditionalGeneration": Wrapper("vision_model multi_modal_projector"),
    "LlavaForConditionalGeneration": Wrapper(_TOWER),
    "LlavaNextForConditionalGeneration": Wrapper(f"{_TOWER} image_newline"),
    "MiniCPMV4_6ForConditionalGeneration": Wrapper("vision_tower merger"),
    "Mistral3ForConditionalGeneration": Wrapper(_TOWER),
    "NemotronH_Nano_Omni_Reasoning_V3": Wrapper(
        f"{_TOWER} vision_model mlp1 sound_encoder sound_projection audio_tower"
    ),
    "NemotronH_Nano_VL_V2": Wrapper("vision_model mlp1"),
    "PaddleOCRVLForConditionalGeneration": Wrapper(
        "visual mlp_AR projector", {"rope_interleave": False}
    ),
    "Qwen2VLForConditionalGeneration": Wrapper("visual"),
    "Qwen2_5_VLForConditionalGeneration": Wrapper("visual"),
    "Qwen3VLForConditionalGeneration": Wrapper("visual"),
    "Qwen3VLMoeForConditionalGeneration": Wrapper("visual", may_transpose_experts=True),
    "Qwen3_5ForConditionalGeneration": Wrapper("visual"),
    "Qwen3_5MoeForConditionalGeneration": Wrapper("visual"),
    "SmolVLMForConditionalGeneration": Wrapper("vision_model connector"),
    "VoxtralForConditionalGeneration": Wrapper("audio_tower multi_modal_projector"),
}
"""Key a name in a configuration's `architectures`."""

TEXT_TYPES: Mapping[str, str] = {
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "glm_ocr_text": "glm4",
    "hunyuan_vl": "hunyuan_v1_dense",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "minicpmv4_6_text": "qwen3_5_text",
    "mistral3_text": "mistral",
    "paddleocr_vl": "ernie4_5",
    "paddleocr_vl_text": "ernie4_5",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
"""Key a model type of a text model with images or sounds, value that of its family alone."""

NAMES: Mapping[str, str] = {
    "language_model.model": "model",
    "model.language_model": "model",
    "model.text_model": "model",
    "language_model.backbone": "backbone",
    "language_model.lm_head": "lm_head",
    "language_model.mtp": "mtp",
}
"""Beginnings of the names of a text model's tensors, and what they are without the other parts."""


def wrapper_of(config: Mapping[str, Any]) -> Wrapper | None:
    """Return the class with images or sounds that config.json names; None for any other."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return WRAPPERS.get(name) if isinstance(name, str) else None


def media_prefixes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return how the tensors begin that the text model does not have; empty for other classes."""
    wrapper = wrapper_of(config)
    return () if wrapper is None else wrapper.prefixes


def part_of(config: Mapping[str, Any]) -> str:
    """Return the key of config.json that describes the text model; empty if its top does."""
    if wrapper_of(config) is None:
        return ""
    return next((key for key in PARTS if isinstance(config.get(key), dict)), "")
