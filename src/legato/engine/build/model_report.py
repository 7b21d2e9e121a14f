"""Reports what a checkpoint is, and how it would run here, from headers alone."""

import math

import msgspec
import torch

from legato.checkpoint.checkpoint import Checkpoint
from legato.checkpoint.hub import open_hub_headers
from legato.checkpoint.loader import check_shapes, open_checkpoint
from legato.checkpoint.source import is_hub_id
from legato.core.config import ModelConfig
from legato.gpu import support as gpu
from legato.kv.state_slots import StateSlots
from legato.model import native_support as native
from legato.model.config_keys import KeyUse
from legato.model.packed_linear import can_pack
from legato.model.spec import DecoderSpec
from legato.model.transformers_spec import TransformersSpec

_EMBEDDING = "model.embed_tokens.weight"
_EXPERT = ".mlp.experts."
_CPU = torch.device("cpu")
_STEPS_IN_FLIGHT = 1
"""On a CPU."""


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, and how it would run on this machine with default settings.

    Attributes:
        num_parameters: values in its weights; a tied output projection counts once.
        num_active_parameters: parameters that compute a token, without the experts not picked.
        dtype: of activations and cache, and of weights unless they are quantized.
        quantization: format of quantized matrices in the file; empty if there are none.
        returns: "text" with an output projection, "scores" with a classification head of one label;
            every model returns "embeddings".
        cpu_layers: the layers that run it on a CPU: "native", "partly native" (PyTorch's, whose
            products, attention and recurrent mixers are native), "PyTorch" or "transformers".
        why_not_native: why PyTorch computes the layers on this CPU; empty if native ones do.
        why_not_gpu: why the GPU's layers cannot run it; empty if they can.
        weight_bytes: memory of the weights on this CPU.
        widened_weight_bytes: the same with `--quantization none`.
        cache_token_bytes: memory of the keys and values of a token.
        cache_bytes: the same for one request as long as the context; of layers with a window, of
            as many tokens as it reaches.
        state_bytes: memory of the recurrent layers' states of a running request.
        keys: what becomes of the keys of its description; all empty if transformers' layers run it.
    """

    model: str
    architecture: str
    num_parameters: int
    num_active_parameters: int
    num_layers: int
    max_model_len: int
    dtype: str
    quantization: str
    returns: tuple[str, ...]
    cpu_layers: str
    why_not_native: str
    why_not_gpu: str
    weight_bytes: int
    widened_weight_bytes: int
    cache_token_bytes: int
    cache_bytes: int
    state_bytes: int
    keys: KeyUse


def report_model(config: ModelConfig) -> ModelReport:
    """Describe a model by the headers of its files.

    Raises:
        ConfigError: there is no such model, or the hub cannot be reached.
        UnsupportedModelError: Legato cannot run it.
    """
    is_remote = is_hub_id(config.model)
    checkpoint = open_hub_headers(config) if is_remote else open_checkpoint(config)
    check_shapes(checkpoint)
    spec, dtype = checkpoint.spec, checkpoint.dtype
    reason = native.why_not_native(spec, dtype, _CPU)
    if isinstance(spec, DecoderSpec):
        native_layers = "partly native" if spec.states else "native"
        cpu_layers, why_not_gpu = "PyTorch" if reason else native_layers, gpu.why_not_computed(spec)
    else:
        cpu_layers, why_not_gpu = "transformers", "transformers' layers run on CPUs alone"
    # PyTorch's experts in partly native layers are widened.
    keeps_codes = not reason and not (
        spec.states and native.why_not_experts(checkpoint.decoder_spec)
    )
    cache = spec.cache(dtype)
    return ModelReport(
        model=config.model,
        architecture=checkpoint.architecture,
        num_parameters=sum(parameter_sizes(checkpoint).values()),
        num_active_parameters=_num_active_parameters(checkpoint),
        num_layers=spec.num_layers,
        max_model_len=spec.max_model_len,
        dtype=str(dtype).removeprefix("torch."),
        quantization=checkpoint.quantization,
        returns=_returns(checkpoint),
        cpu_layers=cpu_layers,
        why_not_native=reason,
        why_not_gpu=why_not_gpu,
        weight_bytes=_weight_bytes(
            checkpoint, dtype, keeps_codes=checkpoint.is_quantized and keeps_codes
        ),
        widened_weight_bytes=widened_weight_bytes(checkpoint, dtype),
        cache_token_bytes=cache.token_bytes,
        cache_bytes=sum(
            group.cache.token_bytes * (group.window or spec.max_model_len)
            for group in cache.groups(spec.max_model_len)
        ),
        state_bytes=StateSlots(1, _STEPS_IN_FLIGHT).slots_per_request
        * sum(shape.num_bytes(dtype) for shape in spec.states),
        keys=checkpoint.keys,
    )


def _num_active_parameters(checkpoint: Checkpoint) -> int:
    sizes, spec = parameter_sizes(checkpoint), checkpoint.spec
    counts = spec.expert_counts if isinstance(spec, DecoderSpec) else None
    if counts is None:
        return sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if _EXPERT in name)
    return sum(sizes.values()) - experts + experts * counts.num_active // counts.num_experts


def _returns(checkpoint: Checkpoint) -> tuple[str, ...]:
    text = ("text",) if checkpoint.generates else ()
    scores = ("scores",) if checkpoint.num_labels == 1 else ()
    return (*text, "embeddings", *scores)


def widened_weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Return the memory of the weights in a dtype, in layers on a CPU."""
    return _weight_bytes(checkpoint, dtype, keeps_codes=False)


def _weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, *, keeps_codes: bool) -> int:
    """Return the memory of the weights in layers on a CPU.

    The embedding stays plain. Native and packed layers keep a tied one a second time, laid out for
    the output projection.
    """
    sizes, spec = parameter_sizes(checkpoint), checkpoint.spec
    embedding = embedding_of(spec)
    itemsize = dtype.itemsize
    plain_embedding = sizes[embedding] * itemsize
    kept = checkpoint.kept_bytes
    head = kept.get(embedding, plain_embedding) if keeps_codes else plain_embedding
    has_copy = spec.tie_word_embeddings and (
        keeps_codes or can_pack(dtype, _CPU) or not native.why_not_native(spec, dtype, _CPU)
    )
    total = sum(kept.values()) if keeps_codes else sum(sizes.values()) * itemsize
    return total + plain_embedding - head + (head if has_copy else 0)


def embedding_of(spec: DecoderSpec | TransformersSpec) -> str:
    """Return the name of the embedding matrix."""
    return _EMBEDDING if isinstance(spec, DecoderSpec) else spec.embedding


def parameter_sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the number of values of each weight that the model needs; key its name."""
    is_tied = checkpoint.spec.tie_word_embeddings
    return {
        name: math.prod(shape)
        for name, shape in checkpoint.shapes.items()
        if not (is_tied and name == "lm_head.weight") and not name.endswith("inv_freq")
    }
