"""What the processes around text tell each other."""

import msgspec

from legato.checkpoint.defaults import ModelDefaults
from legato.engine.process.channel import Ping, Pong
from legato.server.requests.serving import Kind, Serving
from legato.text.text_source import TextSource
from legato.text.vocabulary import Vocabulary

LOW_BY = 10
"""How much nicer the reader of a large or slow body is: the engine's threads go first."""


class LoadText(msgspec.Struct, frozen=True, tag=True):
    """To the zygote, first: what to load.

    Attributes:
        timeout_s: of processor time, for one body or a trial of the template.
    """

    source: TextSource
    timeout_s: float


class Serve(msgspec.Struct, frozen=True, tag=True):
    """To the zygote: what all readers forked from now on read against."""

    serving: Serving


class Fork(msgspec.Struct, frozen=True, tag=True):
    """To the zygote: begin a reader. Its end of a socket pair comes with this.

    Attributes:
        number: names the reader; no other has had it.
        is_low: whether it runs at a low priority from the start.
    """

    number: int
    is_low: bool


ToZygote = LoadText | Serve | Fork | Ping


class TextLoaded(msgspec.Struct, frozen=True, tag=True):
    """From the zygote: it can fork.

    Attributes:
        template_problem: as of `Tokenizer`.
    """

    vocabulary: Vocabulary
    defaults: ModelDefaults
    template_problem: str | None


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """From the zygote: it ends.

    Attributes:
        is_user_error: whether the checkpoint is to blame.
    """

    error: str
    is_user_error: bool


class ReaderEnded(msgspec.Struct, frozen=True, tag=True):
    """From the zygote: a reader is gone.

    Attributes:
        status: of its exit, or the negative number of the signal that ended it.
    """

    number: int
    status: int


FromZygote = TextLoaded | LoadFailed | ReaderEnded | Pong


class ReaderBegun(msgspec.Struct, frozen=True, tag=True):
    """From a reader, first."""

    pid: int


class BodyFollows(msgspec.Struct, frozen=True):
    """To a reader: `num_bytes` of a body come behind this frame, as they are.

    Attributes:
        num_stored_bytes: of `Stored`, which come behind it; None before its reader asked for them.
    """

    kind: Kind
    num_bytes: int
    num_stored_bytes: int | None = None
