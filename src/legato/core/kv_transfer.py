"""Messages about prompts that one engine computes and another continues."""

import msgspec


class SendBlocks(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Keep the blocks of a prompt for another engine, which may fetch them as they are computed.

    Attributes:
        transfer_id: id by which that engine asks for the blocks; it cannot be guessed.
    """

    transfer_id: str


class FetchBlocks(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Take the blocks of a prompt from another engine rather than compute them.

    Attributes:
        host, port: address of that engine.
        is_early: that engine may not have got the prompt yet.
        reader: which of the prompt's completions this is, from 0.
        num_readers: how many completions the prompt has. The other engine keeps its blocks until
            each completion has reported that it is done.
    """

    transfer_id: str
    host: str
    port: int
    is_early: bool = False
    reader: int = 0
    num_readers: int = 1


KVTransfer = SendBlocks | FetchBlocks


class BlocksArrived(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Tells the scheduler that more fetched blocks of a request have arrived.

    Attributes:
        num_tokens: tokens at the request's start whose blocks have arrived.
        read_s: how long the link was busy since the last such event of any request.
        is_over: no more blocks will come, even if some are missing.
    """

    request_id: str
    num_tokens: int
    read_s: float = 0.0
    is_over: bool = False
