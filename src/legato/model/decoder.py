"""The decoder: from token ids to hidden states to logits."""

from collections.abc import Callable
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn

from legato.core.rows import CPU_ROWS
from legato.model.communicator import ALONE, Communicator, part_size
from legato.model.decoder_layer import DecoderLayer
from legato.model.experts import Experts
from legato.model.linear import FusedLinear, Linear, MakeEmpty, RMSNorm, make_norm
from legato.model.model import CacheSpec, LayerWatch, NamedWeights, StepAttention
from legato.model.quantization import copy_plain
from legato.model.rope import RotaryEmbedding
from legato.model.spec import DecoderSpec, LayerInputsSpec
from legato.model.states import StepStates


def embedding_scale(spec: DecoderSpec, dtype: torch.dtype) -> float:
    """Return the factor of embeddings: as in training, it is rounded to their dtype."""
    return float(torch.tensor(spec.embedding_scale, dtype=dtype))


def scaled_embeddings(rows: torch.Tensor, spec: DecoderSpec) -> torch.Tensor:
    """Return embeddings [T, E] as the first hidden states, in float32."""
    if spec.embedding_scale == 1.0:
        return rows.float()
    return rows.float() * embedding_scale(spec, rows.dtype)


def finished_logits(products: torch.Tensor, spec: DecoderSpec) -> torch.Tensor:
    """Return logits [S, V] float32 of products with the output projection, padding included."""
    logits = products[:, : spec.vocab_size]
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    if spec.logit_softcap is not None:
        logits = (logits / spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
    return logits


class TokenEmbedding(nn.Module):
    """A table of token vectors [V, E], or a rank's rows of it, padded to the same number."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        empty: MakeEmpty,
        communicator: Communicator = ALONE,
    ) -> None:
        super().__init__()
        num_rows = part_size(vocab_size, communicator.size)
        self._communicator = communicator
        self.first = communicator.rank * num_rows
        self.weight = nn.Parameter(empty(num_rows, hidden_size), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map [T] int64 to a new tensor [T, E]."""
        if self._communicator.size == 1:
            return F.embedding(input_ids, self.weight)
        rows = input_ids - self.first
        is_own = (rows >= 0) & (rows < len(self.weight))
        found = F.embedding(rows.where(is_own, 0), self.weight)
        return self._communicator.sum(found.where(is_own[:, None], 0))


class LayerInputs(nn.Module):
    """Embeddings of each token for each layer: of its id, and of its first hidden state.

    Args:
        projection: of hidden states [T, E] in the model's dtype to [T, layers * P].
    """

    def __init__(
        self,
        own: LayerInputsSpec,
        spec: DecoderSpec,
        projection: Callable[[torch.Tensor], torch.Tensor],
        empty: MakeEmpty,
        communicator: Communicator,
    ) -> None:
        super().__init__()
        self.size = own.size
        self.context_scale = spec.hidden_size**-0.5
        width = spec.num_layers * own.size
        self.embed_tokens = TokenEmbedding(own.vocab_size, width, empty, communicator)
        self.projection = projection
        self.norm = RMSNorm(own.size, spec.norm_eps, empty)

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Map ids [T] and first hidden states [T, E] to [T, layers, P]."""
        tokens = self.embed_tokens(input_ids)
        tokens = tokens * torch.tensor(self.size**0.5, dtype=tokens.dtype)
        context = self.projection(hidden.to(tokens.dtype)) * self.context_scale
        context = self.norm(context.view(len(context), -1, self.size))
        total: torch.Tensor = (context + tokens.view(context.shape)) * 2**-0.5
        return total


class Decoder(nn.Module):
    """A `Model` of PyTorch's operators: the reference for all architectures, and the fallback.

    Divided among ranks, each rank has its part of every layer and of the vocabulary. All ranks
    compute the same hidden states; only rank 0 gets the logits.

    Args:
        spec: of the whole decoder.
        communicator: to the other ranks.

    Attributes:
        spec: of this rank's part.
    """

    num_torch_threads: int | None = None
    rows = CPU_ROWS

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        communicator: Communicator = ALONE,
    ) -> None:
        super().__init__()
        empty = partial(torch.empty, dtype=dtype, device=device)
        spec = spec.part(communicator.size)
        self.spec = spec
        self.num_weight_bytes = 0
        self._communicator = communicator
        self.embed_tokens = TokenEmbedding(spec.vocab_size, spec.hidden_size, empty, communicator)
        self.layer_inputs: LayerInputs | None = None
        if spec.layer_inputs is not None:
            width = spec.num_layers * spec.layer_inputs.size
            projection = Linear(spec.hidden_size, width, False, empty)
            self.layer_inputs = LayerInputs(
                spec.layer_inputs, spec, projection, empty, communicator
            )
        self.rotary = nn.ModuleList(RotaryEmbedding(rope, device) for rope in spec.ropes)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer, empty, communicator) for layer in range(spec.num_layers)
        )
        self.norm = make_norm(spec, empty)
        self.lm_head: nn.Module | None = (
            None
            if spec.tie_word_embeddings
            else Linear(spec.hidden_size, self.num_part_tokens, False, empty)
        )

    @property
    def cache(self) -> CacheSpec:
        return self.spec.cache(self.dtype)

    @property
    def num_part_tokens(self) -> int:
        """Vocabulary entries whose logits this rank computes, padding included."""
        return len(self.embed_tokens.weight)

    @property
    def drops_rows(self) -> bool:
        """Not beside other ranks, which would have to agree; and a state cannot lose its rows."""
        return self._communicator.size == 1 and not self.spec.states

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype in which the ranks' parts of a layer are summed."""
        return self.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        *,
        states: StepStates | None = None,
        num_layers: int | None = None,
        watch: LayerWatch | None = None,
    ) -> torch.Tensor:
        assert watch is None or self.drops_rows
        # The residual stream is float32 for weights of any dtype: every layer adds to it, so
        # rounding it costs far more accuracy than rounding the values added.
        hidden = scaled_embeddings(self.embed_tokens(input_ids), self.spec)
        ropes = [rotary(positions, self.dtype) for rotary in self.rotary]
        inputs = None if self.layer_inputs is None else self.layer_inputs(input_ids, hidden)
        looks = () if watch is None else watch.looks(len(self.layers))
        for index, layer in enumerate(islice(self.layers, num_layers)):
            if watch is not None and index in looks and (kept := watch.look(index)) is not None:
                count, attention = kept
                hidden, ropes = hidden[:count], [turns.first(count) for turns in ropes]
                inputs = None if inputs is None else inputs[:count]
            own = None if inputs is None else inputs[:, index]
            hidden = layer(hidden, ropes, attention, states, own)
        output: torch.Tensor = self.norm(hidden)
        return output

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.lm_head is None:
            part = F.linear(hidden, self.embed_tokens.weight)
        else:
            part = self.lm_head(hidden)
        return finished_logits(self._communicator.gather(part.float()), self.spec)

    def load_weights(self, weights: NamedWeights) -> None:
        slots = self.checkpoint_slots()
        for name, weight in weights:
            copy_plain(weight, slots[name])
        self.num_weight_bytes = sum(
            slot.nbytes for name, slot in slots.items() if self.spec.reads_every_step(name)
        )

    def checkpoint_slots(self) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor of a checkpoint.

        Returns:
            Key the tensor's name in transformers' checkpoints, value the weight to copy it into, or
            the rows of a fused weight.
        """
        slots: dict[str, torch.Tensor] = {}
        for path, module in self.named_modules():
            prefix = path if path == "lm_head" else f"model.{path}"
            if isinstance(module, Experts):
                slots |= module.checkpoint_slots(prefix)
                continue
            for name, weight in module.named_parameters(recurse=False):
                if isinstance(module, FusedLinear):
                    parent = prefix.rpartition(".")[0]
                    for part, (start, end) in module.parts.items():
                        slots[f"{parent}.{part}.{name}"] = weight[start:end]
                else:
                    slots[f"{prefix}.{name}"] = weight
        return slots
