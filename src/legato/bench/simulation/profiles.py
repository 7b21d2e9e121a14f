"""Machines to simulate: what the steps of a model take on each."""

from pathlib import Path

import msgspec

from legato.core.errors import ConfigError
from legato.engine.startup.calibration_file import read_calibration
from legato.scheduler.cost_fit import MeasuredStep, fit
from legato.scheduler.step_costs import ROW_BOUNDS, StepCosts


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a machine.

    Attributes:
        max_model_len: longest prompt plus output in tokens.
        kv_cache_tokens: whose keys and values fit into the memory.
    """

    costs: StepCosts
    max_model_len: int = 8192
    kv_cache_tokens: int = 131_072

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if self.kv_cache_tokens < self.max_model_len:
            raise ConfigError(
                f"a request of max_model_len {self.max_model_len} tokens does not fit into a cache "
                f"of {self.kv_cache_tokens}"
            )


def load_profile(source: str) -> Profile:
    """A key of `PROFILES`, or a file that `legato calibrate` wrote.

    A file does not tell the sizes of context and cache: they are `Profile`'s defaults.

    Raises:
        ConfigError: it is neither.
    """
    if source in PROFILES:
        return PROFILES[source]
    return Profile(costs=fit(_read_steps(Path(source))))


def _read_steps(path: Path) -> list[MeasuredStep]:
    try:
        return read_calibration(path)[1]
    except FileNotFoundError as error:
        names = ", ".join(PROFILES)
        raise ConfigError(f"no file or profile {str(path)!r}; profiles are: {names}") from error


def _llama_3_8b_h100() -> Profile:
    """Llama 3 8B in bfloat16 on one H100 SXM, from published figures alone: a roofline.

    NVIDIA's datasheet of the H100 SXM gives 80 GB of memory at 3.35 TB/s and 989 TFLOP/s of dense
    bfloat16. Kernels reach a part of that: assumed here are 80 % of the bandwidth, 60 % of the
    arithmetic in matrix products and 50 % in attention (FlashAttention-2 reaches 35 % and
    FlashAttention-3 up to 75 % on an H100, arXiv:2407.08608). The sizes are those of the model's
    config.json (meta-llama/Meta-Llama-3-8B).
    """
    num_layers, d_model, d_kv, d_ff, vocab_size = 32, 4096, 8 * 128, 14_336, 128_256
    value_bytes, flops_per_weight = 2, 2
    bytes_per_s = 0.8 * 3.35e12
    matmul_flops_per_s, attention_flops_per_s = 0.6 * 989e12, 0.5 * 989e12

    # Query and output, key and value, gate and up and down projections: 7.0e9 weights.
    layer_weights = num_layers * d_model * (2 * d_model + 2 * d_kv + 3 * d_ff)
    head_weights = d_model * vocab_size
    # 15.0 GB; of the embeddings, only the batch's rows are read.
    weights_s = (layer_weights + head_weights) * value_bytes / bytes_per_s
    # Reading weights and multiplying by them overlap: only the longer of the two counts, so that
    # tokens are free up to 221 of them.
    layers_s = layer_weights * value_bytes / bytes_per_s
    token_s = layer_weights * flops_per_weight / matmul_flops_per_s
    bounds = (0, *ROW_BOUNDS, 2 * ROW_BOUNDS[-1])
    beyond_s = [max(0.0, num_tokens * token_s - layers_s) for num_tokens in bounds]
    row_s = [
        (beyond_s[i + 1] - beyond_s[i]) / (bounds[i + 1] - bounds[i])
        for i in range(len(bounds) - 1)
    ]
    kv_bytes = 2 * num_layers * d_kv * value_bytes  # of a token: 128 KiB
    # Each query-key pair is multiplied and added d_model times for the score, and again for the
    # weighted sum of the values.
    pair_flops = 4 * d_model * num_layers
    # vLLM's share of the memory, less all weights with the embeddings: 427,000 tokens.
    cache_bytes = 0.9 * 80e9 - (layer_weights + 2 * head_weights) * value_bytes
    return Profile(
        costs=StepCosts(
            step_s=weights_s,
            row_s=tuple(row_s),
            decode_context_s=kv_bytes / bytes_per_s,
            area_s=pair_flops / attention_flops_per_s,
            context_s=kv_bytes / bytes_per_s,
            sample_s=head_weights * flops_per_weight / matmul_flops_per_s,
        ),
        kv_cache_tokens=int(cache_bytes / kv_bytes),
    )


PROFILES = {
    # Measured on two cores of a Xeon.
    "smollm2-135m-cpu": Profile(
        costs=StepCosts(
            step_s=24e-3,
            row_s=(20e-6, 190e-6, 270e-6, 250e-6, 270e-6),
            decode_row_s=0.8e-3,
            decode_context_s=3.6e-6,
            chunk_s=5e-3,
            area_s=0.105e-6,
            context_s=5e-6,
            sample_s=25e-6,
        )
    ),
    "llama-3-8b-h100": _llama_3_8b_h100(),
}
"""Key the name by which `--profile` asks for it."""
