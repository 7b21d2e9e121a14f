"""Native operators in transformers' layers: projections, gated MLPs, RMS norms and rope.

transformers copies the code of a layer from family to family. Where a module's `forward`, or the
function that it calls, is the same code as Llama's, a native operator takes its place; all else
stays PyTorch's. Rows are bfloat16.
"""

from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers.activations import GELUTanh, NewGELUActivation, SiLUActivation
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from legato.model.native_kernels import NativeKernels
from legato.model.native_operators import NativeMLP, NativeNorm, NativeProduct

_DTYPE = torch.bfloat16
_VECTOR = 16
_SILU, _GELU_TANH = (nn.SiLU, SiLUActivation), (GELUTanh, NewGELUActivation)
_SCALED_NORMS = (LlamaRMSNorm, Olmo2RMSNorm)
"""RMS norms that multiply by their weight."""
_ROPE = "apply_rotary_pos_emb"


def use_native_operators(model: nn.Module, kernels: NativeKernels) -> None:
    """Replace the modules of a loaded model that native operators can compute."""
    for name, module in list(model.named_modules()):
        native = _native_mlp(module, kernels) or _native_norm(module, kernels)
        if native is not None:
            model.set_submodule(name, native)
        elif _has_llamas_rope(module):
            _use_native_rope(module, kernels)


def _native_mlp(module: Any, kernels: NativeKernels) -> nn.Module | None:
    if not _has_code_of(module, LlamaMLP):
        return None
    products = (module.gate_proj, module.up_proj, module.down_proj)
    are_native = all(isinstance(part, NativeProduct) and part.is_rounded for part in products)
    is_gelu = isinstance(module.act_fn, _GELU_TANH)
    if not are_native or not (is_gelu or isinstance(module.act_fn, _SILU)):
        return None
    return NativeMLP(*products, is_gelu=is_gelu, kernels=kernels)


def _native_norm(module: Any, kernels: NativeKernels) -> nn.Module | None:
    if any(_has_code_of(module, kind) for kind in _SCALED_NORMS):
        weight, eps = module.weight.float(), module.variance_epsilon
    elif _has_code_of(module, Gemma2RMSNorm):
        weight, eps = module.weight.float() + 1, module.eps
    else:
        return None
    is_known = weight.dim() == 1 and len(weight) % _VECTOR == 0
    return NativeNorm(weight, eps, kernels) if is_known else None


class _NativeRope:
    """Turns queries and keys, in place of a family's function."""

    def __init__(self, usual: Any, kernels: NativeKernels) -> None:
        self._usual = usual
        self._operators = kernels.operators

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn [1, H, T, D] and [1, K, T, D] by [1, T, D]."""
        is_known = (
            unsqueeze_dim == 1
            and query.shape[-1] % (2 * _VECTOR) == 0
            and {query.dtype, key.dtype, cos.dtype, sin.dtype} == {_DTYPE}
            and query.stride(3) == key.stride(3) == 1
        )
        if not is_known:
            pair: tuple[torch.Tensor, torch.Tensor] = self._usual(query, key, cos, sin)
            return pair
        cos, sin = cos.contiguous(), sin.contiguous()
        num_heads, num_rows, head_dim = query.shape[1:]
        num_kv_heads = key.shape[1]
        out = query.new_empty(1, num_rows, num_heads + num_kv_heads, head_dim)
        self._operators.rotate(
            (query.data_ptr(), query.stride(2), query.stride(1)),
            num_heads,
            (key.data_ptr(), key.stride(2), key.stride(1)),
            num_kv_heads,
            num_rows,
            head_dim,
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
        )
        turned = out.transpose(1, 2)
        return turned[:, :num_heads], turned[:, num_heads:]


def _has_llamas_rope(module: nn.Module) -> bool:
    forward: Any = type(module).forward
    if _ROPE not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return False
    return all(
        _is_same(forward.__globals__.get(name), getattr(modeling_llama, name))
        for name in (_ROPE, "rotate_half")
    )


def _use_native_rope(module: nn.Module, kernels: NativeKernels) -> None:
    """Give a module a `forward` whose function for rope is native; its class stays as it is."""
    usual: Any = type(module).forward
    rope = _NativeRope(usual.__globals__[_ROPE], kernels)
    own = FunctionType(
        usual.__code__,
        {**usual.__globals__, _ROPE: rope},
        usual.__name__,
        usual.__defaults__,
        usual.__closure__,
    )
    own.__kwdefaults__ = usual.__kwdefaults__
    module.forward = MethodType(own, module)


def _has_code_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    return _is_same(type(module).forward, kind.forward)


def _is_same(function: Any, known: Any) -> bool:
    """Whether two functions have the same code, names and constants; docstrings may differ."""
    own, other = (getattr(one, "__code__", None) for one in (function, known))
    if own is None or other is None:
        return False
    return _parts(own) == _parts(other)


def _parts(code: Any) -> tuple[Any, ...]:
    constants = [value for value in code.co_consts if not isinstance(value, str)]
    return code.co_code, code.co_names, constants
