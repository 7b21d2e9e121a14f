"""Lockstep on CPUs: rank 0, whose executor makes all ranks compute, and the ranks after it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from legato.core.plan import BlockMove
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.batch import PackedBatch
from legato.executor.cache_memory import raising_memory_error
from legato.executor.host_cache import HostCache
from legato.executor.ranks.agreement import FailedElsewhereError
from legato.executor.ranks.divided import DividedModel
from legato.executor.ranks.rank_messages import (
    Followers,
    Forward,
    Logits,
    Moves,
    RankReport,
    ToRank,
)
from legato.executor.state_cache import StateCache
from legato.executor.torch_executor import TorchExecutor
from legato.model.communicator import RankLostError
from legato.model.model import CacheSpec, LayerWatch, NamedWeights, StepAttention
from legato.model.states import StepStates

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeadStep:
    """A step's batch; its block tables are bound once all ranks have begun the step."""

    batch: PackedBatch
    own: AttentionBackend

    def attend(self, *_: object, **__: object) -> torch.Tensor:
        raise TypeError("only a divided model runs on a divided cache")


class LeadAttention:
    """An `AttentionBackend` for a `LeadModel`.

    Args:
        own: rank 0's part of the cache.
    """

    def __init__(self, own: AttentionBackend) -> None:
        self._own = own

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        return self._own.blocks

    def begin_step(self, batch: PackedBatch) -> LeadStep:
        return LeadStep(batch, self._own)


class LeadModel:
    """A `Model` that makes the other ranks compute with it.

    If rank 0 fails, its own error is raised; if others do, `MemoryError` or `RuntimeError`. If a
    rank is lost, all ranks end, and every later call fails.

    Args:
        num_torch_threads: threads of rank 0.
    """

    drops_rows = False
    """The ranks would have to agree on the time, after each look at the clock."""

    def __init__(
        self, divided: DividedModel, followers: Followers, *, num_torch_threads: int
    ) -> None:
        self._divided = divided
        self._followers = followers
        self.num_torch_threads = num_torch_threads
        self.rows = divided.own.rows

    @property
    def cache(self) -> CacheSpec:
        """The cache of rank 0's part."""
        return self._divided.own.cache

    @property
    def dtype(self) -> torch.dtype:
        return self._divided.own.dtype

    @property
    def device(self) -> torch.device:
        return self._divided.own.device

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of rank 0's part; each rank reads its own, at the same time."""
        return self._divided.own.num_weight_bytes

    def load_weights(self, weights: NamedWeights) -> None:
        """Load rank 0's part."""
        self._divided.own.load_weights(weights)

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
        assert watch is None, "ranks drop no rows"
        assert isinstance(attention, LeadStep)
        batch, own = attention.batch, attention.own
        assert input_ids is batch.input_ids
        assert positions is batch.positions
        return self._on_all(
            Forward.of(batch, states, num_layers),
            lambda: self._divided.forward(batch, own, lambda: states, num_layers),
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        num_rows = len(hidden)
        return self._on_all(
            Logits(num_rows), lambda: self._divided.compute_logits(num_rows, lambda: hidden)
        )

    def _on_all(self, message: ToRank, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            self._followers.broadcast(message)
            return compute()
        except FailedElsewhereError:
            raise _failure(self._followers.reports()) from None
        except RankLostError:
            self._followers.give_up()
            raise
        except Exception:
            self._followers.reports()
            raise
        except BaseException:  # an interrupt leaves the other ranks in the middle of a step
            self._followers.give_up()
            raise


def _failure(reports: Sequence[RankReport]) -> Exception:
    """Return one error for all that the other ranks raised."""
    failed = [report for report in reports if report.error is not None]
    words = "; ".join(str(report.error) for report in failed)
    is_out_of_memory = all(report.is_out_of_memory for report in failed)
    return MemoryError(words) if is_out_of_memory else RuntimeError(words)


class LeadExecutor(TorchExecutor):
    """An executor of a `LeadModel`."""

    def __init__(self, *parts: Any, followers: Followers, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self._followers = followers

    def move(self, moves: Sequence[BlockMove]) -> None:
        self._followers.broadcast(Moves(tuple(moves)))
        super().move(moves)


class HostFollower:
    """A `Follower` on a CPU: a rank's part of the model and of the cache.

    Args:
        states: of the recurrent layers; None if the model has none.
    """

    def __init__(
        self,
        divided: DividedModel,
        attention: AttentionBackend,
        states: StateCache | None,
        host_cache: HostCache,
    ) -> None:
        self._divided = divided
        self._attention = attention
        self._states = states
        self._host_cache = host_cache

    def do(self, message: ToRank) -> RankReport | None:
        match message:
            case Moves(moves):
                self._host_cache.move(moves)
                return None
            case Forward():
                compute = self._forward_of(message)
            case Logits(num_rows):
                compute = self._logits_of(num_rows)
            case _:
                raise TypeError(f"not for a rank on a CPU: {type(message).__name__}")
        try:
            with torch.inference_mode(), raising_memory_error():
                compute()
        except RankLostError:
            raise
        except FailedElsewhereError:
            return RankReport()
        except Exception as error:
            logger.error("rank failed: %r", error)
            told = f"{type(error).__name__}: {error}"
            return RankReport(told, is_out_of_memory=isinstance(error, MemoryError))
        return None

    # All that may fail on this rank alone runs in `DividedModel`: rank 0 waits in its exchanges.

    def _forward_of(self, message: Forward) -> Callable[[], torch.Tensor]:
        batch = message.batch

        def states() -> StepStates | None:
            if self._states is None:
                return None
            return self._states.begin_step(batch, message.states)

        return lambda: self._divided.forward(batch, self._attention, states, message.num_layers)

    def _logits_of(self, num_rows: int) -> Callable[[], torch.Tensor]:
        own = self._divided.own
        shape = num_rows, own.spec.hidden_size
        return lambda: self._divided.compute_logits(
            num_rows, lambda: torch.zeros(shape, dtype=own.dtype)
        )
