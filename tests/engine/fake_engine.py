"""A program that speaks as an engine process does, but computes nothing.

    python fake_engine.py SCRIPT FD

Each start takes a line away from the file SCRIPT and does what it says: "serve", "die" while
loading, "spin" while loading, or "refuse" the configuration. A request named "die", "hang" or
"spin" has it do that; one named "slow" or "foreseen" takes `SLOW_S`, announced or
not. Any other ends at once. All end with the budget that the engine was configured with as the
number of running requests.
Of its state, it says that it has so many blocks.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.replica_state import ReplicaState
from legato.core.request import AbortRequest, AddRequest
from legato.engine.process.channel import Channel, ChannelClosedError, Ping, Pong
from legato.engine.process.engine_messages import (
    CacheInfo,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineStats,
    GetState,
    LongStepBegins,
    Reconfigure,
    SetRecording,
    StartPartEnded,
    StateReport,
    StepOutputs,
    Taken,
)

LONG_S = 60.0  # a test that fails leaves no process behind for long
SLOW_S = 1.2  # four looks of its supervisor in tests
INFO = EngineInfo(
    model="m",
    served_model_names=("m",),
    max_model_len=400,
    vocab_size=32_000,
    cache=CacheInfo(num_blocks=1, block_size=32, dtype="bfloat16", enable_prefix_caching=True),
    scheduler=SchedulerConfig().resolve(400),
    settings={},
)


def main(script: Path, fd: int) -> int:
    channel = Channel(
        socket.socket(fileno=fd),
        EngineConfig | AddRequest | AbortRequest | SetRecording | Reconfigure | GetState | Ping,
    )
    [config] = channel.receive(wait_s=None)
    life, *later = script.read_text().splitlines()
    script.write_text("\n".join(later))
    if life == "die":
        return 4
    if life == "spin":
        spin(LONG_S)
    if life == "refuse":
        channel.send(EngineFailed("it cannot be served", is_user_error=True))
        return 2
    channel.send(StartPartEnded("weights", 1.5))
    channel.send(EngineReady(INFO))
    while True:
        for message in channel.receive(wait_s=None):
            if isinstance(message, AddRequest):
                channel.send(Taken(1))
                serve(channel, message.request_id, config.scheduler.max_num_batched_tokens)
            elif isinstance(message, Ping):
                channel.send(Pong())
            elif isinstance(message, GetState):
                budget = config.scheduler.max_num_batched_tokens
                state = ReplicaState(num_blocks=budget, num_free_blocks=0, block_size=1)
                channel.send(StateReport(state))


def serve(channel: Channel, request_id: str, budget: int) -> None:
    if request_id == "die":
        sys.exit(3)
    if request_id == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    if request_id == "spin":
        spin(LONG_S)
    if request_id == "foreseen":
        channel.send(LongStepBegins(SLOW_S))
    if request_id in {"slow", "foreseen"}:
        spin(SLOW_S)
    output = RequestOutput(request_id=request_id, finish_reason=FinishReason.LENGTH)
    channel.send(StepOutputs([output], EngineStats(num_running=budget)))


def spin(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
    except ChannelClosedError:
        sys.exit(0)
