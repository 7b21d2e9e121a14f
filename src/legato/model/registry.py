"""Which architectures Legato runs."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from legato.core.errors import UnsupportedModelError
from legato.model.llama import llama
from legato.model.mistral import mistral
from legato.model.qwen2 import qwen2
from legato.model.qwen3 import qwen3
from legato.model.spec import DecoderSpec

# Key the name in `config.architectures`, value what reads that architecture's configuration.
ARCHITECTURES: dict[str, Callable[[PreTrainedConfig], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def check_supported(config: dict[str, Any]) -> None:
    """Refuse what Legato cannot run.

    Args:
        config: the contents of config.json. It is checked before transformers reads it, so that the
            refusal names the architecture even where transformers does not know it.

    Raises:
        UnsupportedModelError: an unknown architecture or a quantized checkpoint.
    """
    names = config.get("architectures") or ["(none named)"]
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"unsupported architecture {names[0]}; Legato supports {', '.join(ARCHITECTURES)}"
        )
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"the checkpoint is quantized (method {method!r}), which is not supported; use the "
            "unquantized checkpoint or a GGUF file"
        )


def spec_of(config: PreTrainedConfig) -> DecoderSpec:
    """The shape of a supported model.

    Raises:
        UnsupportedModelError: a setting of its configuration that Legato does not know.
    """
    return ARCHITECTURES[config.architectures[0]](config)
