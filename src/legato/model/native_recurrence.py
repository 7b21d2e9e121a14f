"""Recurrent mixers on native kernels: all that they compute between their projections."""

from collections.abc import Callable

import torch

from legato.model.delta_net import DeltaNet
from legato.model.mamba2 import Mamba2
from legato.model.native_kernels import NativeKernels
from legato.model.recurrence import RecurrentMixer, ShortConv
from legato.model.states import StepStates

_GATE_ORDERS = ("ungated", "unnormed", "norm first", "gate first")
"""In the order of the extension's `GateOrder`."""


class NativeMixer:
    """Computes what a recurrent mixer's `mixed` does, in one call.

    Numbers are float32 in between: rows are not rounded but where they become outputs, or inputs
    that a state keeps. PyTorch gates and normalizes the outputs if several ranks share a norm.

    Args:
        mixer: of loaded weights, which are copied.
    """

    def __init__(self, mixer: RecurrentMixer, kernels: NativeKernels) -> None:
        taps = mixer.conv.weight[:, 0].float().t().contiguous()  # [k, C]
        kind, self._size, numbers, weights = _parts(mixer)
        self._gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        if isinstance(mixer, Mamba2) and mixer.has_shared_norm:
            self._gated = mixer.gated
        weights |= {"taps": taps, "conv_bias": mixer.conv.bias}
        copied = {
            name: weight.float().contiguous()
            for name, weight in weights.items()
            if weight is not None
        }
        self._pool = kernels.pool
        self._native = getattr(kernels.extension, kind)(
            {**numbers, "num_taps": len(taps)},
            {name: weight.data_ptr() for name, weight in copied.items()},
        )

    def __call__(self, projected: torch.Tensor, states: StepStates, layer: int) -> torch.Tensor:
        """Advance the states of a layer by projected rows.

        Args:
            projected: [T, ...].
            layer: index among the recurrent layers.

        Returns:
            [T, ...] in the dtype of the inputs that the states keep: float32 or bfloat16.
        """
        inputs, recurrent = states.layers[layer]
        rows = projected.float().contiguous()
        dtype = inputs.dtype if self._gated is None else torch.float32
        out = torch.empty(len(rows), self._size, dtype=dtype)
        assert inputs.dtype in (torch.float32, torch.bfloat16)
        self._native.forward(
            self._pool,
            states.runs,
            inputs.data_ptr(),
            recurrent.data_ptr(),
            rows.data_ptr(),
            out.data_ptr(),
            inputs.dtype == torch.bfloat16,
        )
        return out if self._gated is None else self._gated(out, rows).to(inputs.dtype)


_Parts = tuple[str, int, dict[str, float], dict[str, torch.Tensor | None]]


def _parts(mixer: RecurrentMixer) -> _Parts:
    """Return a mixer's kind, the size of its output, and its parts by the extension's names."""
    match mixer:
        case ShortConv():
            size = len(mixer.conv.weight)
            return "ShortConv", size, {"num_channels": size}, {}
        case DeltaNet():
            delta = {
                "num_heads": mixer.num_heads,
                "num_key_heads": mixer.num_key_heads,
                "key_dim": mixer.key_dim,
                "value_dim": mixer.value_dim,
                "gate_order": _GATE_ORDERS.index("norm first"),
                "norm_group": mixer.value_dim,
                "eps": mixer.norm.eps,
            }
            norm = mixer.norm.weight.repeat(mixer.num_heads)
            size = mixer.num_heads * mixer.value_dim
            return "DeltaNet", size, delta, {**_gates(mixer), "norm": norm}
        case Mamba2():
            size = mixer.num_heads * mixer.head_dim
            mamba = {
                "num_heads": mixer.num_heads,
                "num_groups": mixer.num_groups,
                "head_dim": mixer.head_dim,
                "state_size": mixer.state_size,
                "shortest_step": mixer.limits[0],
                "longest_step": mixer.limits[1],
                "gate_order": _GATE_ORDERS.index(_gate_order(mixer)),
                "norm_group": size // mixer.num_groups,
                "eps": 0.0 if mixer.norm is None else mixer.norm.eps,
            }
            weights = {"skips": mixer.D, "norm": None if mixer.norm is None else mixer.norm.weight}
            return "Mamba2", size, mamba, {**_gates(mixer), **weights}
        case _:
            raise AssertionError("native kernels do not know the mixer")


def _gate_order(mixer: Mamba2) -> str:
    if mixer.has_shared_norm:
        return "ungated"
    if mixer.norm is None:
        return "unnormed"
    return "norm first" if mixer.is_normed_first else "gate first"


def _gates(mixer: DeltaNet | Mamba2) -> dict[str, torch.Tensor | None]:
    return {"rates": -mixer.A_log.exp(), "dt_bias": mixer.dt_bias}
