"""Ranks of a model that is divided among GPUs.

Each rank has a part of the model and of the cache, and computes every step from the same inputs,
which rank 0 sends. No rank can end the wait of another rank's GPU, so if one fails in a step that
all have begun, all processes end.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from legato.core.plan import BlockMove
from legato.executor.ranks.rank_messages import DeviceStep, Followers, Moves, RowLogits, ToRank
from legato.executor.sequences import BegunStep
from legato.gpu.block_table import Int32s, Int64s, change_table
from legato.gpu.device import Device
from legato.gpu.gpu_executor import GpuExecutor
from legato.gpu.host_cache import GpuHostCache
from legato.gpu.step_inputs import HostStep, StagedInputs, StepSize
from legato.gpu.step_loader import StepLoader
from legato.gpu.step_program import Runner, StepProgram
from legato.model.communicator import RankLostError


class GpuLeadExecutor(GpuExecutor):
    """Rank 0's executor; it has the scheduler and samples. See `GpuExecutor`."""

    def __init__(
        self,
        program: StepProgram,
        device: Device,
        runner: Runner,
        *,
        followers: Followers,
        depth: int,
        **settings: Any,
    ) -> None:
        super().__init__(program, device, runner, depth=depth, **settings)
        self._followers = followers
        self._loader = StepLoader(program, device, depth=depth, tell=self._tell)

    def move(self, moves: Sequence[BlockMove]) -> None:
        self._followers.broadcast(Moves(tuple(moves)))
        with self._as_others_do():
            super().move(moves)

    def _forward(self, step: BegunStep) -> tuple[StepSize, Int64s]:
        with self._as_others_do():
            return super()._forward(step)

    def _logits_of(self, rows: Int32s) -> torch.Tensor:
        self._followers.broadcast(RowLogits(rows.tobytes()))
        with self._as_others_do():
            return super()._logits_of(rows)

    def _tell(self, step: HostStep) -> None:
        self._followers.broadcast(
            DeviceStep(*step.size, step.words.tobytes(), step.table_changes.tobytes())
        )

    @contextmanager
    def _as_others_do(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._followers.give_up()  # they wait for work that this rank has not launched
            if not isinstance(error, Exception):
                raise
            raise RankLostError(f"rank 0 failed: {error}") from error


class GpuFollower:
    """A `Follower` on a GPU: it repeats the device work of rank 0.

    Args:
        runner: has graphs of the same steps as rank 0.
        depth: most steps in flight.
        host_sizes: blocks of swap space in host memory, for each cache group.
    """

    def __init__(
        self,
        program: StepProgram,
        device: Device,
        runner: Runner,
        *,
        depth: int,
        host_sizes: Sequence[int],
    ) -> None:
        self._program = program
        self._device = device
        self._runner = runner
        self._host_cache = GpuHostCache(device, program.blocks, host_sizes)
        self._staged = StagedInputs(device, program.max_words, depth + 1)

    @torch.inference_mode()
    def do(self, message: ToRank) -> None:
        match message:
            case DeviceStep():
                self._forward(_host_step(message))
            case RowLogits(rows):
                model = self._program.model
                index = self._device.upload(_copied(rows, np.int32))
                model.compute_logits(model.hidden_of(index, self._program.residual))
            case Moves(moves):
                self._host_cache.move(moves)
            case _:
                raise TypeError(f"not for a rank on a GPU: {type(message).__name__}")

    def _forward(self, step: HostStep) -> None:
        layout = self._program.layout(step.size)
        num_words = layout.num_words
        assert len(step.words) == num_words, "rank 0 has other steps"
        self._staged.next()[:num_words] = step.words
        change_table(self._device, self._program.block_table, step.table_changes)
        self._staged.copy(self._program.words, num_words)
        self._runner.forward(layout.loaded(step.words))


def _host_step(message: DeviceStep) -> HostStep:
    return HostStep(
        StepSize(message.num_rows, message.num_samples, message.has_chunks),
        _copied(message.words, np.int32),
        _copied(message.table_changes, np.int64).reshape(2, -1),
    )


def _copied(data: bytes, dtype: type[np.int32] | type[np.int64]) -> Any:
    return np.frombuffer(bytearray(data), dtype=dtype)
