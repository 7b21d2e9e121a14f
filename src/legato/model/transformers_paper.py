"""A decoder of transformers on paper: its layers without weights, and what they ask of attention.

The layers run once on the meta device, where nothing is computed. Each call of attention says its
sizes, scale, window and other options; what Legato does not know is refused by its name.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from legato.core.errors import UnsupportedModelError
from legato.model.transformers_attention import NAME, SINKS, AttentionCall, attending
from legato.model.transformers_spec import TransformersSpec

_META = torch.device("meta")
_NUM_ROWS = 2
_CHANGING_ROPES = ("dynamic", "longrope")
_KNOWN = ("sliding_window", "softcap", SINKS)
"""Options of attention that Legato honours."""
_WITHOUT_EFFECT = ("dropout", "position_ids", "use_cache", "output_attentions")
"""Options that change nothing here."""


def on_paper(contents: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """Make a model on the meta device, whose layers attend by Legato's function.

    Only classes of transformers are used, never code of a checkpoint.

    Args:
        contents: of config.json, of a family in `FAMILIES`.
        dtype: of the parameters.
    """
    kind = contents["model_type"]
    # Private fields could name code of the hub, such as an implementation of attention.
    own = {
        name: value
        for name, value in contents.items()
        if name != "quantization_config" and not name.startswith("_")
    }
    config = CONFIG_MAPPING[kind].from_dict(own)
    # Else each step looks for padding.
    config.pad_token_id = None
    config.output_router_logits = False
    with _META:
        # In float32: another dtype would be PyTorch's default meanwhile, in other threads, too.
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(
            config, attn_implementation=NAME, dtype=torch.float32
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.eval()
    return model


def describe(contents: Mapping[str, Any]) -> TransformersSpec:
    """Return the spec of a model of a family in `FAMILIES`.

    Args:
        contents: of config.json.

    Raises:
        UnsupportedModelError: its layers ask for what Legato cannot do.
    """
    _check_ropes(contents)
    model = on_paper(contents, torch.bfloat16)
    config = model.config
    calls = _recorded(model)
    num_layers = config.num_hidden_layers
    if [call.layer for call in calls] != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{len(calls)} calls of attention for {num_layers} layers are not supported"
        )
    sizes = {(call.query.shape[1], call.key.shape[1], call.query.shape[3]) for call in calls}
    if len(sizes) != 1:
        raise UnsupportedModelError("layers with different numbers of heads are not supported")
    ((num_heads, num_kv_heads, head_dim),) = sizes
    names = {module: name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    tied = model.all_tied_weights_keys
    own_head = {f"{names[head]}.weight"}
    if set(tied) - own_head - {f"{names[head]}.bias"}:
        raise UnsupportedModelError(f"shared weights are not supported: {', '.join(tied)}")
    return TransformersSpec(
        config=json.dumps(contents, sort_keys=True),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_model_len=config.max_position_embeddings,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        windows=tuple(call.options.get("sliding_window") for call in calls),
        has_sinks=any(call.sinks is not None for call in calls),
        embedding=f"{names[model.get_input_embeddings()]}.weight",
        head=f"{names[head]}.weight",
        tie_word_embeddings=own_head <= set(tied),
        matrices=tuple(f"{name}.weight" for name, _ in matrices(model).items()),
    )


def matrices(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the projections that Legato computes; key the name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D)
    }


def _check_ropes(contents: Mapping[str, Any]) -> None:
    """Refuse angles that would depend on the other requests of a step."""
    own = contents.get("rope_scaling") or contents.get("rope_parameters") or {}
    for rope in (own, *own.values()):
        if not isinstance(rope, dict):
            continue
        kind = rope.get("rope_type", rope.get("type"))
        if kind in _CHANGING_ROPES:
            raise UnsupportedModelError(
                f"rope type {kind} on transformers' layers is not supported: its angles depend on "
                "the longest request of a step"
            )


@torch.inference_mode()
def _recorded(model: PreTrainedModel) -> list[AttentionCall]:
    """Return the calls of attention in a forward pass."""
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> torch.Tensor:
        _check_call(call)
        calls.append(call)
        return call.query[0].transpose(0, 1)

    ids = torch.zeros(1, _NUM_ROWS, dtype=torch.int64, device=_META)
    with attending(record):
        model.get_decoder()(input_ids=ids, position_ids=ids, use_cache=False)
    return calls


def _check_call(call: AttentionCall) -> None:
    if call.key.shape[3] != call.value.shape[3]:
        raise UnsupportedModelError("keys and values of different sizes are not supported")
    if not call.is_causal:
        raise UnsupportedModelError("attention to later tokens is not supported")
    for name, value in call.options.items():
        is_off = value is None or value is False
        if not is_off and name not in (*_KNOWN, *_WITHOUT_EFFECT):
            raise UnsupportedModelError(f"attention with {name} is not supported")
