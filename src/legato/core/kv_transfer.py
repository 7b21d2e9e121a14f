"""Prompts that one engine computes and another one continues."""

import msgspec


class SendBlocks(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Keep the blocks of a prompt for another engine, which may fetch them as they are computed.

    Attributes:
        transfer_id: what it asks for them by; nobody can guess it.
    """

    transfer_id: str


class FetchBlocks(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Take the blocks of a prompt from another engine rather than compute them.

    Attributes:
        host, port: where that engine answers.
        is_early: it may not have heard of the prompt yet.
        reader: which of the prompt's completions this is, from 0.
        num_readers: how many completions the prompt has. The other engine keeps its blocks until
            each has said that it is done.
    """

    transfer_id: str
    host: str
    port: int
    is_early: bool = False
    reader: int = 0
    num_readers: int = 1


KVTransfer = SendBlocks | FetchBlocks


class BlocksArrived(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """To the scheduler: of what a request had fetched, more is there.

    Attributes:
        num_tokens: at its start, whose blocks hold what they should.
        read_s: how long the link was busy since the last time that this was told of any request.
        is_over: no more will come, whether that is all or not.
    """

    request_id: str
    num_tokens: int
    read_s: float = 0.0
    is_over: bool = False
