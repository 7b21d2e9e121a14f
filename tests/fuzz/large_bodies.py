"""Bodies that are hostile by their size: they take long to read."""

import json
import random
from collections.abc import Callable

Body = tuple[str, bytes]
"""The path, and what is sent there."""

_WORDS = ["a", "very ", "Once upon a time ", " ", "\n", "🎻", "é", "7", "<|im_end|>", "xq", "的"]
_NUM_PROMPTS = 1024


def _list(path: str, before: str, item: str, after: str) -> Callable[[random.Random, int], Body]:
    """A body that is one item over and over."""

    def make(_: random.Random, num_bytes: int) -> Body:
        return path, _filled(before, item, after, num_bytes)

    return make


def _text(path: str, before: str, after: str) -> Callable[[random.Random, int], Body]:
    """A body that is one long text, of one word over and over or of many."""

    def make(rng: random.Random, num_bytes: int) -> Body:
        words = rng.choice([_WORDS, [rng.choice(_WORDS)]])
        some = "".join(rng.choices(words, k=1000))
        room = num_bytes - len(before) - len(after)
        is_escaped = rng.random() < 0.2
        encoded = json.dumps(some, ensure_ascii=is_escaped)[1:-1]
        text = encoded * (room // len(encoded.encode()))
        return path, f"{before}{text}{after}".encode()

    return make


def _logit_bias(_: random.Random, num_bytes: int) -> Body:
    entries = ",".join(f'"{token}":1' for token in range(num_bytes // 12))
    return "/v1/completions", f'{{"prompt":"Hi","logit_bias":{{{entries}}}}}'.encode()


def _many_keys(rng: random.Random, num_bytes: int) -> Body:
    keys = ",".join(f'"{rng.getrandbits(32):x}":{{}}' for _ in range(num_bytes // 14))
    return "/v1/chat/completions", f"{{{keys}}}".encode()


def _prompts(rng: random.Random, num_bytes: int) -> Body:
    """As many as one request may have, of tokens or of text."""
    room = num_bytes // _NUM_PROMPTS - 3
    if rng.random() < 0.5:
        prompt = json.dumps([5] * (room // 2), separators=(",", ":"))
    else:
        prompt = json.dumps("very " * (room // 5))
    body = _filled('{"max_tokens":1,"prompt":[', prompt, "]}", num_bytes)
    return "/v1/completions", body


def _nested(rng: random.Random, num_bytes: int) -> Body:
    opened, closed = rng.choice([("[", "]"), ('{"a":', "}"), ('{"messages":[', "]}")])
    depth = num_bytes // (len(opened) + len(closed)) - 20
    body = '{"messages":' + opened * depth + "1" + closed * depth + "}"
    return "/v1/chat/completions", body.encode()


def _filled(before: str, item: str, after: str, num_bytes: int) -> bytes:
    room = num_bytes - len(before) - len(after)
    return (before + ",".join([item] * (room // (len(item) + 1))) + after).encode()


_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_HI = '"messages":[{"role":"user","content":"Hi"}]'

LARGE: dict[str, Callable[[random.Random, int], Body]] = {
    "empty messages": _list(_CHAT, '{"messages":[', "{}", "]}"),
    "short messages": _list(
        _CHAT, '{"max_tokens":1,"messages":[', '{"role":"user","content":"a"}', "]}"
    ),
    "parts of a message": _list(
        _CHAT,
        '{"max_tokens":1,"messages":[{"role":"user","content":[',
        '{"type":"text","text":"a"}',
        "]}]}",
    ),
    "one message": _text(_CHAT, '{"max_tokens":1,"messages":[{"role":"user","content":"', '"}]}'),
    "one prompt": _text(_COMPLETION, '{"max_tokens":1,"prompt":"', '"}'),
    "one prompt of tokens": _list(_COMPLETION, '{"max_tokens":1,"prompt":[', "5", "]}"),
    "many prompts": _prompts,
    "tokenize": _text("/tokenize", '{"return_token_strs":true,"prompt":"', '"}'),
    "tokenize messages": _list(
        "/tokenize", '{"messages":[', '{"role":"user","content":"a b"}', "]}"
    ),
    "detokenize": _list("/detokenize", '{"tokens":[', "1234", "]}"),
    "stop numbers": _list(_COMPLETION, '{"prompt":"Hi","stop":[', "1", "]}"),
    "stop strings": _list(_COMPLETION, '{"prompt":"Hi","stop":[', '"ab"', "]}"),
    "stop tokens": _list(_COMPLETION, '{"prompt":"Hi","stop_token_ids":[', "7", "]}"),
    "logit_bias": _logit_bias,
    "tools": _list(
        _CHAT, f'{{{_HI},"tools":[', '{"type":"function","function":{"name":"f"}}', "]}"
    ),
    "template kwargs": _list(_CHAT, f'{{{_HI},"chat_template_kwargs":{{"x":[', '{"a":[]}', "]}}"),
    "metadata": _text(_CHAT, f'{{{_HI},"metadata":{{"a":"', '"}}'),
    "many keys": _many_keys,
    "a long key": _text(_CHAT, '{"', '":1}'),
    "a long number": lambda _, num_bytes: (
        _COMPLETION,
        b'{"prompt":"Hi","seed":' + b"7" * (num_bytes - 30) + b"}",
    ),
    "a long name": _text(_CHAT, f'{{{_HI},"model":"', '"}'),
    "nesting": _nested,
    "white space": lambda _, num_bytes: ("/tokenize", b" " * (num_bytes - 15) + b'{"prompt":"a"}'),
    "no end": _list("/tokenize", '{"prompt":[', '"Hi"', ""),
}
"""Key the kind; each makes a body of about as many bytes."""
