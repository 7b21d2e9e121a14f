"""Finds a model's files in a process of its own, so that the server answers probes meanwhile.

A download in a thread could not be interrupted.
"""

import asyncio
import os
import socket
import sys
import threading

import msgspec

from legato.checkpoint.source import configured_source, is_of_hub
from legato.core import signals
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError
from legato.core.logs import follow_logging
from legato.engine.process.child_process import ChildProcess
from legato.language.tokenizer.loading import TextSource, text_source

_PROGRAM = (sys.executable, "-m", "legato.api.download")
_STOP_TIMEOUT_S = 5.0


class Found(msgspec.Struct, frozen=True, tag=True):
    """The files of a model. Attributes: `passed_over`: as of `ModelSource`."""

    text: TextSource
    passed_over: list[str]


class _Refused(msgspec.Struct, frozen=True, tag=True):
    error: str


def may_download(config: ModelConfig) -> bool:
    """Whether files may have to come from the hub; else `find` takes no time."""
    return any(map(is_of_hub, filter(None, (config.model, config.tokenizer))))


def find(config: ModelConfig) -> Found:
    """Find the files; raises `ConfigError` if there are none."""
    source = configured_source(config)
    return Found(text_source(config, source), source.passed_over)


async def download(config: ModelConfig) -> Found:
    """Find the files in another process, which ends with the call; raises as `find`."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = ChildProcess(_PROGRAM, theirs.fileno(), {})
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        writer.write(msgspec.json.encode(config) + b"\n")
        answer = await reader.read(-1)
    except ConnectionError:
        answer = b""
    finally:
        writer.close()
        process.kill()
        await process.ends_within(_STOP_TIMEOUT_S)
    if not answer:
        raise ConfigError(f"the download of {config.model} ended: {process.end}")
    found = msgspec.json.decode(answer, type=Found | _Refused)
    if isinstance(found, _Refused):
        raise ConfigError(found.error)
    return found


def main(fd: int) -> None:
    """Answer the server at a socket, and end with it. Args: fd: the socket's."""
    signals.leave_to_parent()
    follow_logging()
    with socket.socket(fileno=fd) as connection, connection.makefile("rb") as asked:
        config = msgspec.json.decode(asked.readline(), type=ModelConfig)
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        try:
            answer: Found | _Refused = find(config)
        except ConfigError as error:
            answer = _Refused(str(error))
        connection.sendall(msgspec.json.encode(answer))
        os._exit(0)  # the hub's threads would be waited for


def _end_with(connection: socket.socket) -> None:
    connection.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
