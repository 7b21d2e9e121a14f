"""The process of a rank above 0: `python -m legato.engine.build.ranks.main FD`.

`RankProcesses` starts it. It has a part of the model and of the cache, and nothing else.
"""

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any, TypeVar

from legato.core.garbage import uncollected
from legato.core.logs import follow_logging
from legato.core.signals import leave_to_parent
from legato.engine.build.ranks.rank_start import BeRank, FromLead, Join, MakeCache, RankReady
from legato.engine.process.channel import Channel, ChannelClosedError, on_hang_up
from legato.engine.process.engine_messages import EngineFailed
from legato.model.communicator import RankLostError

logger = logging.getLogger(__name__)

_Message = TypeVar("_Message")


def main(fd: int) -> int:
    leave_to_parent()
    follow_logging()
    sock = socket.socket(fileno=fd)
    try:
        return _follow(Channel(sock, FromLead), sock)
    except (ChannelClosedError, RankLostError):
        return 0  # rank 0 reports it, unless it is lost itself
    except Exception:
        logger.exception("a rank fails, and the others end with it")
        return 1


def _follow(channel: Channel, sock: socket.socket) -> int:
    start = _next(channel, BeRank)
    try:
        with uncollected():
            from legato.engine.build.ranks.rank import load_rank

            rank = load_rank(start.config, start.rank)
            if rank.blocks_on_lost_rank:
                on_hang_up([sock], lambda: os._exit(0))
            channel.send(RankReady())
            rank.join(Path(_next(channel, Join).meeting_point))
            channel.send(RankReady(rank.cache_bytes()))
            cache = _next(channel, MakeCache)
            rank.make_cache(cache.sizes, cache.num_states)
            channel.send(RankReady())
            follower = rank.follower(cache.host_sizes, cache.num_host_states)
    except (ChannelClosedError, RankLostError):
        raise
    except Exception as error:
        failure = EngineFailed.at_start(error)
        logger.error("rank %d cannot start: %s", start.rank, failure.error)
        channel.send(failure)
        return 1
    while True:
        has_more = rank.untaken is not None and rank.untaken.has_more
        messages = channel.receive(wait_s=0.0 if has_more else None)
        if not messages and rank.untaken is not None:
            rank.untaken.take_slice()
        for message in messages:
            report = follower.do(message)
            if report is not None:
                channel.send(report)


def _next(channel: Channel, kind: type[_Message]) -> _Message:
    message: Any
    [message] = channel.receive(wait_s=None)
    assert isinstance(message, kind), message
    return message


if __name__ == "__main__":
    # Without clean-up: a GPU may wait for ever for a lost rank.
    os._exit(main(int(sys.argv[1])))
