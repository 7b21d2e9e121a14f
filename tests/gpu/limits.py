"""What GPUs have."""

Architecture = int | str
"""NVIDIA's compute capability, or AMD's name."""

MOST_SHARED_BYTES: dict[Architecture, int] = {
    80: 163 * 1024,
    90: 227 * 1024,
    "gfx942": 64 * 1024,
}
"""Value what a block of threads may have."""
