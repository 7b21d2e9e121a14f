"""What GPUs have."""

MOST_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Key compute capability, value what a block of threads may have."""
