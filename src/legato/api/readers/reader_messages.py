"""Messages between the HTTP server, the zygote and the readers."""

import msgspec

from legato.api.bodies.body_model import Kind, Serving
from legato.checkpoint.defaults import ModelDefaults
from legato.core.vocabulary import Vocabulary
from legato.engine.process.channel import Ping, Pong
from legato.language.tokenizer.loading import TextSource

QUICK_NICENESS, SLOW_NICENESS = 5, 10
"""Added niceness of readers, of small bodies and of large or slow ones: the engine's threads go
first. A burst of small bodies takes longer than a step to read. At the engine's priority it took
half of a core's time meanwhile, at this one a quarter. What forks them has that of small bodies."""


class LoadText(msgspec.Struct, frozen=True, tag=True):
    """To the zygote, first: the text files to load.

    Attributes:
        timeout_s: of processor time, for one body or a trial of the template.
    """

    source: TextSource
    timeout_s: float


class Serve(msgspec.Struct, frozen=True, tag=True):
    """To the zygote: the model and settings for all readers forked from now on."""

    serving: Serving


class Fork(msgspec.Struct, frozen=True, tag=True):
    """To the zygote: fork a reader. Its end of a socket pair comes with this message.

    Attributes:
        number: the reader's unique id.
        niceness: added to the server's from the start.
    """

    number: int
    niceness: int


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
    """From the zygote: loading failed, and it ends.

    Attributes:
        is_user_error: whether the checkpoint is at fault.
    """

    error: str
    is_user_error: bool


class ReaderEnded(msgspec.Struct, frozen=True, tag=True):
    """From the zygote: a reader has ended.

    Attributes:
        status: its exit status, or the negative number of the signal that ended it.
    """

    number: int
    status: int


FromZygote = TextLoaded | LoadFailed | ReaderEnded | Pong


class ReaderBegun(msgspec.Struct, frozen=True, tag=True):
    """From a reader, first: it runs."""

    pid: int


class ReaderRetires(msgspec.Struct, frozen=True, tag=True):
    """From a reader, before the end of its last answer: it has grown, and ends after it."""


class BodyFollows(msgspec.Struct, frozen=True):
    """To a reader: `num_bytes` of a body follow this frame, unencoded.

    Attributes:
        num_stored_bytes: of `Stored`, which follows the body; None until a reader asked for it.
    """

    kind: Kind
    num_bytes: int
    num_stored_bytes: int | None = None
