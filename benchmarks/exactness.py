"""How far are Legato's logits from transformers' on the real model, in fp32 and in bf16?

    python -m benchmarks.exactness [--length 2000]

The reference is transformers in fp32. In bf16 the two implementations round at different places, so
the fair yardstick for Legato's bf16 error is transformers' own.
"""

import argparse
import os
from functools import cache
from pydoc_data import topics

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL, ModelConfig
from legato.core.plan import ScheduledChunk
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.batch import pack
from legato.executor.sequence import SequenceState
from legato.model.base import Model
from legato.text.tokenizer import Tokenizer, load_tokenizer

BLOCK_SIZE = 16
CPU = torch.device("cpu")


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
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    ).eval()


def legato_model(dtype: torch.dtype) -> Model:
    return load_model(open_checkpoint(ModelConfig()), dtype=dtype, device=CPU)


@torch.inference_mode()
def chunked_logits(model: Model, token_ids: list[int], chunk: int, keep: int) -> torch.Tensor:
    """Logits of the last `keep` tokens, [keep, V], the prompt computed in chunks of `chunk`."""
    block_ids = tuple(range(-(-len(token_ids) // BLOCK_SIZE)))
    backend = TorchAttentionBackend(
        model.cache, num_blocks=len(block_ids), block_size=BLOCK_SIZE, device=CPU
    )
    message = AddRequest(
        request_id="", prompt_token_ids=token_array(token_ids), params=SamplingParams(max_tokens=1)
    )
    sequence = SequenceState(message)
    rows: list[torch.Tensor] = []
    for start in range(0, len(token_ids), chunk):
        size = min(chunk, len(token_ids) - start)
        plan = ScheduledChunk("", start, size, block_ids, 0, "prefill")
        batch = pack([plan], [sequence], block_size=BLOCK_SIZE, device=CPU)
        hidden = model.forward(batch.input_ids, batch.positions, backend.begin_step(batch))
        rows.append(hidden[max(0, size - keep) : size])
    return model.compute_logits(torch.cat(rows)[-keep:])


@torch.inference_mode()
def transformers_logits(model: PreTrainedModel, token_ids: list[int], keep: int) -> torch.Tensor:
    """The same, [keep, V] float32, the prompt computed whole."""
    return model(torch.tensor([token_ids]), logits_to_keep=keep).logits[0].float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2000, help="prompt tokens")
    parser.add_argument("--keep", type=int, default=64, help="last positions to compare")
    arguments = parser.parse_args()
    tokens, keep = natural_tokens(arguments.length), arguments.keep
    console = Console()
    with console.status("transformers fp32"):
        reference = transformers_logits(transformers_model(torch.float32), tokens, keep)
    table = Table("logits of", "max error", "relative to the largest logit", "same best token")
    with console.status("transformers bf16"):
        logits = transformers_logits(transformers_model(torch.bfloat16), tokens, keep)
    _add_row(table, "transformers bf16", logits, reference)
    for dtype in (torch.float32, torch.bfloat16):
        model = legato_model(dtype)
        for chunk in (64, 512, len(tokens)):
            name = f"Legato {str(dtype).removeprefix('torch.')}, chunks of {chunk}"
            with console.status(name):
                _add_row(table, name, chunked_logits(model, tokens, chunk, keep), reference)
    console.print(f"{len(tokens)} prompt tokens, last {keep} positions, against transformers fp32")
    console.print(table)


def _add_row(table: Table, name: str, logits: torch.Tensor, reference: torch.Tensor) -> None:
    error = (logits - reference).abs().max().item()
    agreement = (logits.argmax(-1) == reference.argmax(-1)).float().mean().item()
    relative = error / reference.abs().max().item()
    table.add_row(name, f"{error:.2e}", f"{relative:.2e}", f"{agreement:.1%}")


if __name__ == "__main__":
    main()
