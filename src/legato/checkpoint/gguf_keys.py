"""Accounts for every metadata key of a GGUF file, as `config_keys` does for a config.json."""

from collections.abc import Mapping
from typing import Any

from legato.checkpoint.defaults import GGUF_SAMPLING_KEYS
from legato.checkpoint.gguf_file import GGUFFile
from legato.model.config_keys import KeyUse

_SAMPLING = "general.sampling."
_TOKENIZER = "tokenizer."
_PREFIXES = {
    "general.": "it is about the model's name and origin, or its file",
    "quantize.": "it is about how the file was made",
    "split.": "it is about how the file was made",
}
"""Key how metadata keys begin, value why they have no effect; `general.sampling.` is none."""
_WITHOUT_EFFECT: Mapping[str, str] = {
    "it follows from the tensors": (
        "expert_shared_count expert_shared_feed_forward_length full_attention_interval vocab_size"
    ),
    "it is about how the model was trained": "rope.scaling.finetuned",
    "a token of text has one position": "rope.dimension_sections",
    "images do not run": "n_deepstack_layers",
}
"""Key the reason, value the keys of the model as words; any value is without effect."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "general.sampling.mirostat": (0,),
    "general.sampling.xtc_probability": (0,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
    "use_parallel_residual": (False,),
}
"""Keys that some architectures do not read, with the values that mean no effect."""


def key_use(file: GGUFFile, implied: Mapping[str, tuple[Any, ...]]) -> KeyUse:
    """Account for every metadata key of a file whose description has been read.

    Those of the tokenizer are left out.

    Args:
        implied: `GGUFArchitecture.implied`.
    """
    keys = {key: value for key, value in file.metadata.items() if not key.startswith(_TOKENIZER)}
    used = {*file.read_keys, "general.architecture", *GGUF_SAMPLING_KEYS.values()}
    reasons = {
        key: _reason(key.removeprefix(f"{file.architecture}."), value, implied)
        for key, value in keys.items()
        if key not in used
    }
    return KeyUse(
        used=tuple(key for key in keys if key in used),
        defaulted=tuple(sorted(file.read_keys - keys.keys())),
        without_effect={key: reason for key, reason in reasons.items() if reason},
        unread=tuple(key for key, reason in reasons.items() if not reason),
    )


def _reason(key: str, value: object, implied: Mapping[str, tuple[Any, ...]]) -> str:
    """Return why a key has no effect with this value; empty if it may have one."""
    for prefix, reason in _PREFIXES.items():
        if key.startswith(prefix) and not key.startswith(_SAMPLING):
            return reason
    for reason, keys in _WITHOUT_EFFECT.items():
        if key in keys.split():
            return reason
    if value in implied.get(key, ()):
        return "the architecture has no other value"
    return "this value changes nothing" if value in _NEUTRAL.get(key, ()) else ""
