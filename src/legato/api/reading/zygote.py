"""Loads the tokenizer once, and forks reader processes in milliseconds.

It has a single thread, as forking needs, and runs nothing whose duration a client or a template
decides.
"""

import contextlib
import gc
import logging
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Callable

from legato.api.limits import TEMPLATE_MEMORY_BYTES
from legato.api.readers.reader_messages import (
    QUICK_NICENESS,
    Fork,
    FromZygote,
    LoadFailed,
    LoadText,
    ReaderEnded,
    Serve,
    TextLoaded,
    ToZygote,
)
from legato.api.reading import reader
from legato.api.reading.request_reader import RequestReader
from legato.checkpoint.defaults import ModelDefaults
from legato.core.errors import UnsupportedModelError
from legato.engine.process.channel import ChannelClosedError, FrameDecoder, Ping, Pong, pack_frame
from legato.language.tokenizer.loading import load_text
from legato.language.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_READ_BYTES = 2**16
_MAX_FDS = 64
_TRIAL = -1  # number of the process that tries the template


class Zygote:
    """Forks readers, and reports how they end.

    Args:
        sock: to the HTTP process.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FrameDecoder(ToZygote)
        self._messages: deque[ToZygote] = deque()
        self._fds: deque[int] = deque()  # one for each `Fork` in `_messages`
        self._pids: dict[int, int] = {}  # key: reader's number
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)

    def run(self) -> None:
        """Serve until the HTTP process is gone; kill the readers and raise `ChannelClosedError`."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        try:
            self._serve()
        finally:
            self._ignore_ends()
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)

    def _serve(self) -> None:
        asked = self._next()
        assert isinstance(asked, LoadText)
        try:
            tokenizer, defaults = load_text(asked.source)
        except UnsupportedModelError as error:
            self._send(LoadFailed(str(error), is_user_error=True))
            return
        except Exception as error:
            logger.exception("the tokenizer cannot be loaded")
            self._send(LoadFailed(f"{type(error).__name__}: {error}", is_user_error=False))
            return
        if tokenizer.template_problem is None:
            self._try_template(tokenizer, asked.timeout_s)
        if tokenizer.template_problem is not None and asked.source.chat_template is not None:
            self._send(LoadFailed(tokenizer.template_problem, is_user_error=True))
            return
        self._send(TextLoaded(tokenizer.vocabulary, defaults, tokenizer.template_problem))
        gc.freeze()  # or a collection in a child would copy all pages that it visits
        self._obey(tokenizer, defaults, asked.timeout_s)

    def _try_template(self, tokenizer: Tokenizer, timeout_s: float) -> None:
        """Try the template in a child first, since it may loop; then here, to compile it.

        Both have the same limits: Jinja goes on where a constant is too large for one, and would
        make it where there is none.
        """

        def warm_up() -> None:
            with reader.time_bound(timeout_s):
                tokenizer.warm_up()
                with reader.memory_bound(TEMPLATE_MEMORY_BYTES):
                    tokenizer.try_template()

        if self._status_of(_TRIAL, warm_up) == 0:
            with contextlib.suppress(MemoryError):
                warm_up()
                return
        tokenizer.template_problem = (
            f"the chat template does not work: it took more than {timeout_s:g} s of "
            "processor time for one short message, or more memory than it may"
        )

    def _obey(self, tokenizer: Tokenizer, defaults: ModelDefaults, timeout_s: float) -> None:
        requests: RequestReader | None = None
        niceness_of_server = os.getpriority(os.PRIO_PROCESS, 0)
        os.nice(QUICK_NICENESS)  # a fork takes as long as many a body
        while True:
            match self._next():
                case Serve(serving):
                    requests = RequestReader(tokenizer, defaults, serving)
                case Fork(number, niceness):
                    assert requests is not None, "bodies come once it is known what is served"
                    self._fork_reader(number, niceness_of_server + niceness, requests, timeout_s)
                case Ping():
                    self._send(Pong())

    def _fork_reader(
        self, number: int, niceness: int, requests: RequestReader, timeout_s: float
    ) -> None:
        sock = socket.socket(fileno=self._fds.popleft())

        def work() -> None:
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
            reader.serve(sock, requests, timeout_s)

        with sock:
            try:
                self._fork(number, work)
            except OSError as error:
                logger.error("no process can be forked: %s", error)
                self._send(ReaderEnded(number, 1))

    def _fork(self, number: int, work: Callable[[], None]) -> None:
        pid = os.fork()
        if pid:
            self._pids[number] = pid
            return
        status = 1
        try:
            self._let_go()
            reader.bound_memory()
            work()
            status = 0
        except MemoryError:
            os.abort()
        except BaseException:
            logger.exception("a process that reads bodies fails")
        finally:
            os._exit(status)

    @staticmethod
    def _ignore_ends() -> None:
        """Let no child's end be written to a socket that is about to be closed."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _let_go(self) -> None:
        """In a child: close what belongs only to the zygote."""
        self._ignore_ends()
        for sock in (self._socket, self._woken, self._wakes):
            sock.close()
        for fd in self._fds:
            os.close(fd)

    def _status_of(self, number: int, work: Callable[[], None]) -> int:
        """Run work in a child, and wait for it; messages wait too."""
        self._fork(number, work)
        ended = self._reaped()
        while number not in ended:
            self._wait()
            ended |= self._reaped()
        return ended[number]

    def _next(self) -> ToZygote:
        """Return the next message, after reporting readers that ended before it."""
        while not self._messages:
            self._wait()
            for number, status in self._reaped().items():
                self._send(ReaderEnded(number, status))
        return self._messages.popleft()

    def _wait(self) -> None:
        """Wait until a message comes or a child ends."""
        readable, _, _ = select.select([self._socket, self._woken], [], [])
        if self._woken in readable:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(_READ_BYTES)
        if self._socket in readable:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, _READ_BYTES, _MAX_FDS)
            except OSError as error:
                raise ChannelClosedError from error
            if not data:
                raise ChannelClosedError
            self._fds += fds
            self._messages += self._frames.feed(data)

    def _reaped(self) -> dict[int, int]:
        """Reap ended children; key the number, value the status."""
        ended: dict[int, int] = {}
        for number, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._pids[number]
                ended[number] = os.waitstatus_to_exitcode(status)
        return ended

    def _send(self, message: FromZygote) -> None:
        try:
            self._socket.sendall(pack_frame(message))
        except OSError as error:
            raise ChannelClosedError from error
