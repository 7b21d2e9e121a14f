"""Families that transformers' own layers run, and why others cannot. Torch-free.

A family is on the list once a test has shown that its greedy tokens are transformers' under every
schedule. What the layers of a model ask of attention is then read from the layers themselves
(`transformers_paper.py`), so that a new option of a family is refused, not ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legato.core.config import ModelImpl
from legato.core.errors import UnsupportedModelError
from legato.core.validation import refusing_what_fails
from legato.model.architectures import ARCHITECTURES, text_config

FAMILIES: Mapping[str, str] = {
    "afmoe": "AfmoeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "biogpt": "BioGptForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "cwm": "CwmForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
}
"""Key a `model_type`, value the class of transformers that runs it."""

_RECURRENT = "its layers carry a recurrent state, not only keys and values"
_DISTANCE = "its attention adds biases by distance"
_BOTH_WAYS = "its tokens attend to later tokens"
_LATENT = "its keys and values have different sizes"
_ENCODED = "it attends to what an encoder computes"
_OWN_ATTENTION = "its attention is not that of transformers' attention interface"

_INDEXED = "an indexer chooses the keys that its layers attend to"
_HEADS = "its layers have different numbers of heads, and gates of their own"
_SOUNDS = "it reads sounds"

_REASONS: Mapping[str, str] = {
    _INDEXED: "dots3_note glm5_next hy_v4 minimax_m3_vl qwen4_exp",
    _HEADS: "laguna step3p5 step3p7",
    _SOUNDS: "glmasr moss_transcribe_diarize qwen3_asr voxtral_realtime",
    "its layers mix several streams": "deepseek_v4",
    "its weights depend on whether a token is of text or of an image": "ernie4_5_moe_vl phi4mm",
    "it does not write one token after the other": "diffusion_gemma",
    "its router and its shared expert are not described yet": "bailing_moe",
    "its attention has gates of their own": "muse_glimmer",
    "its files have Mistral's own names": "mistral_large3 mistral_large4",
    "its layers are not described yet": (
        "deepseek_vl_v2 inkling kimi_k3 plamo2 plamo3 unlimited_ocr"
    ),
    _RECURRENT: (
        "bailing_hybrid bamba falcon_h1 falcon_mamba jamba kimi_linear lfm2 lfm2_moe lfm3 mamba "
        "mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text "
        "qwen3_next recurrent_gemma rwkv xlstm zamba zamba2"
    ),
    _DISTANCE: "bloom mpt",
    _BOTH_WAYS: "bert camembert electra ernie roberta xlm-roberta xlnet",
    _LATENT: (
        "deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 mimo_v2 mimo_v2_flash minicpm3 mistral4 "
        "youtu"
    ),
    _ENCODED: "bart marian mbart pegasus trocr whisper",
    _OWN_ATTENTION: "codegen falcon gpt_neo gptj xglm",
    "each of its layers attends twice": "diffllama",
    "some of its layers read the keys and values of others": "gemma3n gemma3n_text",
    "its layers have heads of different sizes": (
        "gemma4 gemma4_text gemma4_unified gemma4_unified_text"
    ),
}
"""Key why a family cannot run, value its model types, as words."""


def runs_on_transformers(folder: Path, config: dict[str, Any], asked: ModelImpl) -> bool:
    """Whether transformers' layers run a model, rather than Legato's own.

    Args:
        folder: for messages.
        config: contents of its config.json.

    Raises:
        UnsupportedModelError: neither can, or transformers' were asked for and cannot. It says why
            in one line.
    """
    with refusing_what_fails(folder / "config.json"):
        name = (text_config(config).get("architectures") or [None])[0]
        if asked == "legato" or (asked == "auto" and name in ARCHITECTURES):
            return False
        kind = str(config.get("model_type"))
        if kind not in FAMILIES or FAMILIES[kind] != name:
            raise UnsupportedModelError(
                f"unsupported architecture {name or '(none named)'}: {_reason(config)}"
            )
    return True


def _reason(config: Mapping[str, Any]) -> str:
    kind = str(config.get("model_type"))
    for reason, kinds in _REASONS.items():
        if kind in kinds.split():
            return reason
    if kind in FAMILIES:
        return f"of the model type {kind}, Legato runs {FAMILIES[kind]}"
    if config.get("auto_map"):
        return "its layers are code of the checkpoint (auto_map), which Legato never runs"
    return f"the model type {kind} is on no list of Legato's"
