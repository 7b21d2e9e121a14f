"""Reads the input of a custom tool out of a function's arguments, while they are written."""

import json
import re

from legato.server.requests.tools import CUSTOM_INPUT

_BEGIN = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_WHOLE = re.compile(
    r"""(?: [^"\\]                                                  # a character
          | \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}  # a pair of surrogates
          | \\u(?![dD][89abAB])[0-9a-fA-F]{4}                       # any other code unit
          | \\u[dD][89abAB][0-9a-fA-F]{2}                          # a surrogate without a partner
            (?= [^\\] | \\[^u] | \\u(?![dD][c-fC-F])[0-9a-fA-F]{2} )
          | \\[^u]                                                  # a short escape
        )*""",
    re.VERBOSE | re.DOTALL,
)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class CustomInput:
    """Reads `{"input": "..."}` piece by piece; the result does not depend on the pieces.

    A grammar holds the arguments to that form (`CustomTool.described`).
    """

    def __init__(self) -> None:
        self._unread = ""
        self._has_begun = False

    def feed(self, arguments: str) -> str:
        """Return the input's next characters. Args: arguments: the next piece of the JSON text."""
        self._unread += arguments
        if not self._has_begun:
            begin = _BEGIN.match(self._unread)
            if begin is None:
                return ""
            self._has_begun = True
            self._unread = self._unread[begin.end() :]
        found = _WHOLE.match(self._unread)
        assert found is not None, "it matches the empty text"
        self._unread = self._unread[found.end() :]
        text: str = json.loads(f'"{found[0]}"', strict=False)
        return _LONE_SURROGATE.sub("\ufffd", text)
