"""Settings of engines whose outputs do not depend on the rest of the batch, not in one bit."""

from legato.model.native_kernels import native_instructions

KERNELS = next((name for name in ("avx512", "avx2") if name in native_instructions()), None)
"""Native kernels that compute a row in one order of sums, alone and in any step."""
EXACT_MODEL = {
    "quantization": "none",
    **({"dtype": "float32"} if KERNELS is None else {"kernels": KERNELS}),
}
"""Fields of `ModelConfig`, for one thread. Products with codes round rows to 8 bits in small steps
alone. In float32, PyTorch's outputs hardly depend on the batch, and a token takes five times as
long."""
EXACT = tuple(word for name, value in EXACT_MODEL.items() for word in (f"--{name}", value))
"""The same as flags."""
