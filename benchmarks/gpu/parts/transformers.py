"""The same batch by transformers, which runs without a network."""

import time

import torch

from benchmarks.gpu.figures import Report, Row
from benchmarks.gpu.settings import Settings
from legato.checkpoint.checkpoint import Checkpoint
from legato.checkpoint.loader import open_checkpoint

TITLE = "transformers"


def run(settings: Settings, report: Report) -> None:
    report.note("Its own continuous batching, with a cache for all of the batch.")
    report.add(_transformers(settings))


def _transformers(settings: Settings) -> Row:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    count, length, num_tokens = settings.sizes.batch
    config = AutoConfig.from_pretrained(settings.model)
    with settings.torch_device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    _fill(model, open_checkpoint(settings.engine().model), settings.torch_device)
    prompts = settings.prompts
    inputs = [list(prompts.draw(length)) for _ in range(count)]
    asked = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1)
    batching = ContinuousBatchingConfig(
        num_blocks=1 + count * -(-(length + num_tokens) // ContinuousBatchingConfig.page_size),
        max_batch_tokens=max(settings.sizes.chunks),
    )

    def generate() -> None:
        model.generate_batch(
            inputs=inputs,
            generation_config=asked,
            continuous_batching_config=batching,
            persistent_manager=True,
        )

    model.eval()
    generate()  # captures its graphs
    begun_s = time.perf_counter()
    generate()
    taken_s = time.perf_counter() - begun_s
    model.destroy_cached_continuous_batching_manager()
    return Row(
        name=f"transformers: output of {count} x {length:,} in, {num_tokens} out",
        value=count * num_tokens / taken_s,
        unit="tokens/s",
    )


@torch.no_grad()
def _fill(model: torch.nn.Module, checkpoint: Checkpoint, device: torch.device) -> None:
    """The same weights as Legato's."""
    weights = dict(model.named_parameters())
    for name, weight in checkpoint.tensors(device):
        assert isinstance(weight, torch.Tensor)
        weights[name].copy_(weight)
