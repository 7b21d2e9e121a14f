"""The ranks after the first, on a CPU: they run rank 0's messages in order."""

import logging

import torch

from legato.executor.attention.base import AttentionBackend
from legato.executor.host_cache import HostCache
from legato.executor.memory import raising_memory_error
from legato.executor.ranks.agreement import FailedElsewhereError
from legato.executor.ranks.divided import DividedModel
from legato.executor.ranks.rank_messages import Forward, Logits, Moves, RankReport, ToRank
from legato.model.communicator import RankLostError

logger = logging.getLogger(__name__)


class HostFollower:
    """A `Follower` on a CPU: a rank's part of the model and of the cache.

    Args:
        num_host_slots: blocks of swap space in host memory.
    """

    def __init__(
        self, divided: DividedModel, attention: AttentionBackend, *, num_host_slots: int
    ) -> None:
        self._divided = divided
        self._attention = attention
        self._host_cache = HostCache(attention.blocks[0], num_host_slots)

    def do(self, message: ToRank) -> RankReport | None:
        if isinstance(message, Moves):
            self._host_cache.move(message.moves)
            return None
        try:
            with torch.inference_mode(), raising_memory_error():
                self._compute(message)
        except RankLostError:
            raise
        except FailedElsewhereError:
            return RankReport()
        except Exception as error:
            logger.error("rank failed: %r", error)
            told = f"{type(error).__name__}: {error}"
            return RankReport(told, is_out_of_memory=isinstance(error, MemoryError))
        return None

    def _compute(self, message: ToRank) -> None:
        match message:
            case Forward():
                batch = message.batch
                self._divided.forward(
                    batch.input_ids,
                    batch.positions,
                    lambda: self._attention.begin_step(batch),
                    message.num_layers,
                )
            case Logits(num_rows):
                own = self._divided.own
                rows = torch.zeros(num_rows, own.spec.hidden_size, dtype=own.dtype)
                self._divided.compute_logits(rows)
            case _:
                raise TypeError(f"not for a rank on a CPU: {type(message).__name__}")
