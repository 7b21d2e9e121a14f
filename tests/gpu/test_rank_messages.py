"""What rank 0 of several GPUs tells the others, and what becomes of that."""

from typing import Any

import pytest

from legato.core.plan import BlockMove
from legato.engine.build.ranks.rank_start import FromLead
from legato.engine.errors import EngineFaultError
from legato.engine.process.channel import pack, unpacker
from legato.executor.ranks.rank_messages import RankReport, ToRank
from legato.gpu.ranks import GpuFollower, GpuLeadExecutor
from legato.model.communicator import RankLostError
from tests.gpu.executors import MAX_LEN, Engine, request
from tests.gpu.host_twin import HostTwin
from tests.gpu.token_program import TokenProgram, greedy
from tests.scheduler.foretold import Foretold, token_in

BLOCKS = {"block_size": 4, "num_blocks": 24}
DEPTH = 2


def program_of(device: HostTwin) -> TokenProgram:
    return TokenProgram(device, num_slots=2 * DEPTH, max_len=MAX_LEN, **BLOCKS)


class Followers:
    """One, behind frames; `told` by rank 0 until it is given up."""

    def __init__(self) -> None:
        device = HostTwin()
        self.program = program_of(device)
        self.follower = GpuFollower(self.program, device, self.program, depth=DEPTH, host_sizes=[8])
        self.told: list[ToRank] = []
        self.is_given_up = False

    def broadcast(self, message: ToRank) -> None:
        if self.is_given_up:
            raise RankLostError("given up")
        received: Any = unpacker(FromLead).decode(pack(message))
        self.told.append(received)
        assert self.follower.do(received) is None

    def reports(self) -> list[RankReport]:
        raise NotImplementedError

    def give_up(self) -> None:
        self.is_given_up = True


def engine_of(followers: Followers, **more: Any) -> tuple[Engine, TokenProgram]:
    device = HostTwin()
    program = program_of(device)
    executor = GpuLeadExecutor(
        program, device, program, followers=followers, depth=DEPTH, host_sizes=[8]
    )
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 9, "admission_optimism": 1.0}
    return Engine(executor, num_slots=8, **settings, **BLOCKS, **more), program


def test_every_rank_has_the_same_inputs() -> None:
    """Behind chunks, preemption and blocks that are swapped out and in."""
    followers = Followers()
    engine, program = engine_of(followers)
    prompts = {f"{i}": [(i + 3 * j) % 40 for j in range(20 + i)] for i in range(5)}
    tokens = engine.run([request(name, prompt, max_tokens=30) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert tokens[name] == greedy(prompt, 30), name
    other = followers.program
    assert other.num_runs == program.num_runs > 20
    assert other.words.equal(program.words)
    assert other.block_table.equal(program.block_table)
    assert not other.last_token.any(), "it samples nothing"


def test_every_rank_verifies_the_same_drafts() -> None:
    """After tokens that only the devices have, each rank its own."""
    followers = Followers()
    prompts = {f"{i}": [i, 7, 9] for i in range(2)}
    outputs = {name: greedy(prompt, 20) for name, prompt in prompts.items()}
    rows = {name: [*prompt, *outputs[name]] for name, prompt in prompts.items()}
    drafter = Foretold(token_in(rows), lambda _, position: position % 7 > 0)
    engine, program = engine_of(followers, drafters=[drafter], speculative=2)
    asked = [request(name, prompt, max_tokens=20) for name, prompt in prompts.items()]
    assert engine.run(asked) == outputs
    assert followers.program.num_runs == program.num_runs < 16
    assert followers.program.words.equal(program.words)


def test_where_rank_0_fails_all_are_given_up() -> None:
    """They wait on their GPUs for what it has not asked of its own."""
    followers = Followers()
    engine, program = engine_of(followers)
    program.faults[2] = MemoryError("full")
    with pytest.raises(EngineFaultError, match="full"):
        engine.run([request("it", list(range(20)), max_tokens=3)])
    assert followers.is_given_up


def test_blocks_are_moved_on_all_ranks() -> None:
    followers = Followers()
    device = HostTwin()
    program = program_of(device)
    executor = GpuLeadExecutor(
        program, device, program, followers=followers, depth=DEPTH, host_sizes=[8]
    )
    for each in (program, followers.program):
        each.blocks[0].zero_()
        each.blocks[0][:, :, 3] = 7.0
    executor.move([BlockMove(3, 5, to_host=True)])
    executor.move([BlockMove(9, 5, to_host=False)])
    for each in (program, followers.program):
        assert (each.blocks[0][:, :, 9] == 7.0).all()
        assert not each.blocks[0][:, :, 8].any()
