"""Accounts for every key of a config.json: used, without effect for a reason, or unread.

A key is used if the family names it beside its function, or if it is in `_ELSEWHERE`.
It is without effect if a list here, or the family's `Architecture.implied`, has it: some keys with
any value, others with the values that change nothing. All other keys are unread: with one of them
the model may not run as its authors meant.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from legato.model.architecture import Architecture
from legato.model.architectures import ARCHITECTURES, text_config
from legato.model.description import SPELLINGS, RopeKeys, keys_of
from legato.model.rope import PARAMETERS
from legato.model.wrappers import OUTER, part_of


class KeyUse(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a checkpoint's description, by use. Keys of a part begin with the part's key.

    Attributes:
        used: keys of the file that Legato reads.
        defaulted: keys that Legato reads and the file lacks, so that a default holds.
        without_effect: keys of the file that Legato does not need; value the reason.
        unread: keys of the file that Legato does not read, though they may matter.
    """

    used: tuple[str, ...] = ()
    defaulted: tuple[str, ...] = ()
    without_effect: Mapping[str, str] = {}
    unread: tuple[str, ...] = ()


_FIRST_OUTSIDE = OUTER | {"eos_token_id"}
_ELSEWHERE = _FIRST_OUTSIDE | {
    *("model_type", "is_causal", "rope_interleave", "num_nextn_predict_layers")
}
"""Keys that other code than the families reads."""

_WITHOUT_EFFECT: Mapping[str, str] = {
    "only training reads it": (
        "attention_dropout attention_probs_dropout_prob aux_loss_alpha classifier_dropout "
        "embd_pdrop embedding_dropout embedding_initializer_range gradient_checkpointing "
        "hidden_dropout hidden_dropout_prob init_method initializer_factor initializer_range "
        "input_jitter_noise moe_capacity num_mtp_modules mtp_transformer_layers "
        "output_router_logits rescale_prenorm_residual resid_pdrop residual_dropout "
        "router_aux_loss_coef router_jitter_noise seq_aux time_step_floor time_step_max "
        "time_step_min time_step_rank use_mtp block_mlp_init_scale block_out_init_scale "
        "block_use_xavier_init conv_use_xavier_init moe_drop_tokens "
        "moe_random_routing_dropped_token"
    ),
    "it is about how another program computes or answers": (
        "_attn_implementation _attn_implementation_autoset attn_implementation "
        "attention_softmax_in_fp32 cache_implementation chunk_size chunk_size_feed_forward ep_size "
        "id2label label2id mamba_chunk_size mamba_ssm_cache_dtype mamba_ssm_dtype "
        "moe_shared_expert_overlap num_logits_to_keep output_attentions output_hidden_states "
        "pretraining_tp problem_type return_dict scale_attention_softmax_in_fp32 torchscript "
        "use_cache use_flash_attention use_mamba_kernels use_return_dict"
    ),
    "it names versions, files or code": (
        "_commit_hash _name_or_path architectures auto_map finetuning_task tokenizer_class "
        "transformers.js_config transformers_version unsloth_fixed unsloth_version"
    ),
    "the tokenizer's files say it": (
        "bos_token_id decoder_start_token_id eod_token_id im_end_id im_start_id mask_init_id "
        "pad_id pad_token_id sep_token_id text_end_id text_start_id unk_token_id"
    ),
    "images and sounds do not run": (
        "audio_config audio_token_id begin_of_audio_token_id begin_of_image_token boa_token_id "
        "boi_token_id boi_token_index do_image_splitting downsample_factor downsample_mode "
        "downsample_ratio dynamic_image_size encoder_patch_size eoa_token_id eoa_token_index "
        "eoi_token_id eoi_token_index force_image_size ignore_index image_end_id "
        "image_end_token_id image_grid_pinpoints image_newline_id image_seq_length image_start_id "
        "image_start_token_id image_token_id image_token_index img_context_token "
        "img_context_token_id img_end_token_id img_start_token_id insert_layer_id "
        "max_dynamic_patch max_image_tokens max_num_patches max_pixels_tolerance max_tiles "
        "media_placeholder_token_id min_dynamic_patch min_image_tokens min_tiles "
        "mm_tokens_per_image multimodal_projector_bias num_image_token pad2square patch_size "
        "projector_bias projector_hidden_act projector_hidden_size projector_use_layernorm "
        "ps_version scale_factor select_layer sound_config sound_context_token_id "
        "spatial_merge_size template text_tokens_id tile_size use_backbone_lora "
        "use_image_special_tokens use_llm_lora use_thumbnail use_unified_vision_encoder "
        "video_context_token video_end_token_id video_placeholder video_pruning_rate "
        "video_start_token_id video_token_id vision_config vision_end_token_id "
        "vision_feature_layer vision_feature_select_strategy vision_soft_tokens_per_image "
        "vision_start_token_id vision_token_id vit_hidden_size projector_intermediate_size"
    ),
    "predictors of further tokens do not run": (
        "mtp_layer_types mtp_layers_block_type mtp_mlp_layer_types mtp_num_hidden_layers "
        "mtp_use_dedicated_embeddings num_mtp_layers"
    ),
    "it follows from other keys": (
        "_sliding_window_pattern block_dim block_norm_eps conv_dim conv_dim_out expand "
        "initial_context_length mlp_expansion_factor num_heads qk_head_dim"
    ),
}
"""Key the reason, value the keys as words; any value is without effect."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attn_layer_indices": (None,),
    "clip_qkv": (None,),
    "compression_ratio": (1,),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "is_llama_config": (True,),
    "layer_types": (None, "full_attention"),
    "lm_head_bias": (False,),
    "mamba_proj_bias": (False,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "partial_rotary_factor": (1, None),
    "residual_in_fp32": (False,),
    "rope_interleaved": (False,),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
}
"""Keys whose effect some families lack, with the values that mean none; in a list, each of them."""
_ROPE_ELSEWHERE = {"rope_type", "type"}
_ROPE_WITHOUT_EFFECT = dict.fromkeys(
    ("mrope_section", "mrope_interleaved", "xdrope_section"), "a token of text has one position"
)


def key_use(config: dict[str, Any]) -> KeyUse:
    """Account for every key of a config.json.

    Args:
        config: its contents, or the same keys from other metadata, of a supported architecture.
    """
    text = text_config(config)
    architecture = ARCHITECTURES[text["architectures"][0]]
    part = part_of(config)
    own: Mapping[str, Any] = config[part] if part else {}
    used: list[str] = []
    reasons: dict[str, str] = {}
    unread: list[str] = []
    named = keys_of(architecture.keys).keys()
    known = _ELSEWHERE | named
    outside = known | {"architectures", part}
    inside_first = {key: f"the {key} of {part} goes first" for key in (own.keys() & named) - OUTER}
    outside_first = {
        key: f"the file's own {key} goes first" for key in config.keys() & _FIRST_OUTSIDE
    }
    for prefix, contents, read, elsewhere in (
        ("", config, outside, inside_first),
        (f"{part}.", own, known, outside_first),
    ):
        for key, value in contents.items():
            if key in elsewhere:
                reasons[prefix + key] = elsewhere[key]
            elif key in read:
                used.append(prefix + key)
            elif reason := _reason(key, value, architecture):
                reasons[prefix + key] = reason
            else:
                unread.append(prefix + key)
    if issubclass(architecture.keys, RopeKeys):
        for key, reason in _rope_keys(text):
            if reason:
                reasons[key] = reason
            else:
                unread.append(key)
    others = (name for names in SPELLINGS.values() if set(names) & set(text) for name in names)
    defaulted = named - set(text) - set(others)
    return KeyUse(
        used=tuple(used),
        defaulted=tuple(sorted(defaulted)),
        without_effect=reasons,
        unread=tuple(unread),
    )


def _reason(key: str, value: object, architecture: Architecture) -> str:
    """Return why a key has no effect with this value; empty if it may have one."""
    for reason, keys in _WITHOUT_EFFECT.items():
        if key in keys.split():
            return reason
    granted = architecture.implied.get(key)
    if granted is not None and (not granted or _is_one_of(value, granted)):
        return "the family has no other value" if granted else "the family does without it"
    if key in _NEUTRAL and _is_one_of(value, _NEUTRAL[key]):
        return "this value changes nothing"
    return ""


def _is_one_of(value: object, allowed: tuple[Any, ...]) -> bool:
    return value in allowed or (isinstance(value, list) and all(v in allowed for v in value))


def _rope_keys(text: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rope parameters that no rope type has, and why they have no effect, or nothing."""
    for name in SPELLINGS["own_rope"]:
        parameters = text.get(name) or {}
        by_kind = {
            f"{name}.{kind}": own for kind, own in parameters.items() if isinstance(own, Mapping)
        }
        for prefix, own in (by_kind or {name: parameters}).items():
            for key in own.keys() - PARAMETERS - _ROPE_ELSEWHERE:
                yield f"{prefix}.{key}", _ROPE_WITHOUT_EFFECT.get(key, "")
