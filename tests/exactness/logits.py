"""Logits of the default model, by Legato and by transformers."""

import os
from functools import cache
from pydoc_data import topics
from unittest.mock import patch

import torch
from gguf import GGUFReader, get_tensor_name_map
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL, ModelConfig
from legato.core.plan import ScheduledChunk
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.native_backend import BLOCK_MULTIPLE, NativeAttentionBackend
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.batch import pack
from legato.executor.sequence import SequenceState
from legato.language.tokenizer.tokenizer import Tokenizer, load_tokenizer
from legato.model.model import Model
from legato.model.native_model import NativeModel

_BLOCK_SIZE = BLOCK_MULTIPLE
_CPU = torch.device("cpu")


def natural_tokens(length: int, *, skip: int = 0) -> list[int]:
    """Tokens of English prose that every Python carries: its own language reference."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    text = text[skip * 10 : (skip + length + 100) * 10]
    return _tokenizer().encode(text)[:length]


@cache
def _tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_source(DEFAULT_MODEL))


def transformers_model(dtype: torch.dtype) -> PreTrainedModel:
    """The same GGUF file, read and dequantized by transformers."""
    folder, file = os.path.split(resolve_source(DEFAULT_MODEL).path)
    # It reads the file for the settings and for the weights, each time for several seconds, and
    # makes the same table of names for each module.
    with (
        patch("gguf.GGUFReader", cache(GGUFReader)),
        patch("gguf.get_tensor_name_map", cache(get_tensor_name_map)),
    ):
        return AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        ).eval()


def legato_model(dtype: torch.dtype) -> Model:
    return load_model(open_checkpoint(ModelConfig()), dtype=dtype, device=_CPU)


@torch.inference_mode()
def chunked_logits(model: Model, token_ids: list[int], chunk: int, keep: int) -> torch.Tensor:
    """Logits of the last `keep` tokens, [keep, V], the prompt computed in chunks of `chunk`."""
    block_ids = tuple(range(-(-len(token_ids) // _BLOCK_SIZE)))
    sizes = {"num_blocks": len(block_ids), "block_size": _BLOCK_SIZE}
    backend = (
        NativeAttentionBackend(model, model.cache, **sizes)
        if isinstance(model, NativeModel)
        else TorchAttentionBackend(model.cache, **sizes, device=_CPU)
    )
    message = AddRequest(
        request_id="", prompt_token_ids=token_array(token_ids), params=SamplingParams(max_tokens=1)
    )
    sequence = SequenceState(message)
    rows: list[torch.Tensor] = []
    for start in range(0, len(token_ids), chunk):
        size = min(chunk, len(token_ids) - start)
        plan = ScheduledChunk("", start, size, block_ids, 0, "prefill")
        batch = pack([plan], [sequence], block_size=_BLOCK_SIZE, device=_CPU, padding=model.rows)
        hidden = model.forward(batch.input_ids, batch.positions, backend.begin_step(batch))
        rows.append(hidden[max(0, size - keep) : size])
    return model.compute_logits(torch.cat(rows)[-keep:])


@torch.inference_mode()
def transformers_logits(model: PreTrainedModel, token_ids: list[int], keep: int) -> torch.Tensor:
    """The same, [keep, V] float32, the prompt computed whole."""
    return model(torch.tensor([token_ids]), logits_to_keep=keep).logits[0].float()
