"""What engines put out."""

from collections.abc import Iterable

from legato.core.outputs import RequestOutput


def tokens_of(outputs: Iterable[RequestOutput]) -> dict[str, list[int]]:
    """Return the tokens of each request that has an output; key its id."""
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens
