"""Rewrites a Lark grammar for texts that stand within a string of JSON.

llguidance finds the ends of terminals by one byte of lookahead. Within JSON that is not enough: a
backslash may begin another character of a terminal, or the line end after it. So the rewritten
grammar has no terminals but single characters, and its rules do the rest.
"""

import json
import re
from collections.abc import Iterator

import regex

from legato.core.errors import InvalidRequestError

_SHORT = {'"': '"', "\\": "\\\\", "\n": "n", "\t": "t", "\r": "r", "\b": "b", "\f": "f"}
"""Key a character that JSON escapes, value what follows the backslash, as a pattern."""
_LONG = [chr(code) for code in range(0x20) if chr(code) not in _SHORT]
_ANY_LONG = r"u00(?:0[0-7bBeEfF]|1[0-9a-fA-F])"
_PLAIN = r'[^"\\\x00-\x1f]'
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
      | (?P<range>"(?:\\.|[^"\\])*"\s*\.\.\s*"(?:\\.|[^"\\])*")
      | (?P<text>"(?:\\.|[^"\\\n])*")(?P<fold>i?)
      | /(?P<pattern>(?:\\.|[^/\\\n])+)/(?P<flags>[imslux]*)
      | %import\s+common\s*\.\s*(?P<common>\w+)(?:\s*->\s*(?P<alias>\w+))?
      | (?P<foreign>%\w+|<\[|<[^\s>]+>)
      | (?P<name>[A-Za-z_]\w*)""",
    re.VERBOSE | re.DOTALL,
)
_ATOM = re.compile(
    r"""(?P<group>\(\?(?P<set>[a-z]*)(?:-(?P<unset>[a-z]+))?(?P<end>[:)])|\((?:\?P?<\w+>)?)
      | (?P<close>\))
      | (?P<class>\[)
      | (?P<kind>\\(?:[dDwWsS]|[pP](?:\{[^}]*\}|.)))
      | (?P<place>\\[bBAz]|[\^$])
      | (?P<char>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[xu]\{[0-9a-fA-F]+\}|.))
      | (?P<count>(?:\{\d+(?:,\d*)?\}|[*+?])\??)
      | (?P<or>\|)
      | (?P<any>\.)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_BRACED = re.compile(r"\\[xu]\{([0-9a-fA-F]{1,8})\}")
_CODES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": r"--[^\n]*",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+(?:[eE][+-]?[0-9]+)|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
}
"""Key a terminal of Lark's library, value its pattern."""


def escaped_lark(grammar: str) -> str:
    """Return the grammar of the same texts as JSON's strings spell them.

    Of a character's spellings in JSON, the usual one is allowed: a short escape if there is one.

    Args:
        grammar: in llguidance's dialect.

    Raises:
        InvalidRequestError: it has a part that cannot be rewritten.
    """
    return _TOKEN.sub(_rewritten, grammar)


def _rewritten(found: re.Match[str]) -> str:
    if found["range"]:
        first, last = (_text(part) for part in re.split(r'(?<=")\s*\.\.\s*', found["range"]))
        return _class(f"[{_class_char(first)}-{_class_char(last)}]")
    if found["text"]:
        folds = bool(found["fold"])
        return f"({_sequence(_char(char, folds=folds) for char in _text(found['text']))})"
    if found["pattern"]:
        return _rule(found["pattern"].replace("\\/", "/"), found["flags"])
    if found["common"]:
        if found["common"] not in _COMMON:
            raise _impossible(found[0])
        name = _name(found["alias"] or found["common"])
        return f"{name}: {_rule(_COMMON[found['common']])}"
    if found["foreign"]:
        raise _impossible(found["foreign"])
    return _name(found["name"]) if found["name"] else ""


def _name(name: str) -> str:
    """Return a rule's name for a name; those of terminals are in capitals."""
    return f"terminal_{name.lower()}" if name.isupper() else name


def _text(literal: str) -> str:
    try:
        text: str = json.loads(literal)
    except ValueError as error:
        raise _impossible(f"the text {literal}") from error
    return text


class _Flags:
    """The flags of the open groups of a pattern; each a set of letters."""

    def __init__(self, flags: str) -> None:
        self._open = [set(flags)]

    def open(self, on: str, off: str) -> None:
        self._open.append((self._open[-1] | set(on)) - set(off))

    def change(self, on: str, off: str) -> None:
        self._open[-1] = (self._open[-1] | set(on)) - set(off)

    def close(self) -> None:
        if len(self._open) > 1:
            self._open.pop()

    def __contains__(self, flag: str) -> bool:
        return flag in self._open[-1]


def _rule(pattern: str, flags: str = "") -> str:
    """Return the right side of a rule for a pattern in the syntax of Rust's `regex`."""
    return f"({_sequence(_with_empty(_parts(pattern, _Flags(flags))))}"


def _parts(pattern: str, flags: _Flags) -> Iterator[str]:
    """Yield the parts of a rule, which stand for the atoms of a pattern."""
    place = 0
    while place < len(pattern):
        found = _ATOM.match(pattern, place)
        assert found is not None, "it matches any character"
        place = found.end()
        kind = found.lastgroup
        if kind == "class":
            place = _class_end(pattern, found.start())
            yield _class(pattern[found.start() : place], folds="i" in flags)
        elif kind == "group":
            yield from _opened(found, flags)
        elif kind == "place":
            if found[0] not in ("^", "$") or 0 < found.start() < len(pattern) - 1:
                raise _impossible(f"{found[0]} in a pattern")
        else:
            yield _part(found, flags)
        if "x" in flags:
            raise _impossible("the flag x")


def _opened(found: re.Match[str], flags: _Flags) -> Iterator[str]:
    """Yield the beginning of a group; nothing if it only changes flags."""
    on, off = found["set"] or "", found["unset"] or ""
    if found["end"] == ")":
        flags.change(on, off)
    else:
        flags.open(on, off)
        yield "("


def _part(found: re.Match[str], flags: _Flags) -> str:
    match found.lastgroup:
        case "close":
            flags.close()
            return ")"
        case "count":
            count = found[0]
            return count.rstrip("?") if count[0] == "{" else count[0]
        case "or":
            return "|"
        case "any":
            return _class(r"[\s\S]" if "s" in flags else r"[^\n]")
        case "kind":
            return _class(f"[{found[0]}]")
    return _char(_denoted(found[0]), folds="i" in flags)


def _with_empty(parts: Iterator[str]) -> Iterator[str]:
    """Yield the parts, and an empty text where an alternative has none."""
    before = "("
    for part in (*parts, ")"):
        if before in "(|" and part in "|)":
            yield '""'
        if before and part:
            yield part
        before = part


def _sequence(parts: Iterator[str]) -> str:
    """Join parts; a count stands at once after its part, and an empty text is one, too."""
    written = ""
    for part in parts:
        is_count = part[0] in "*+?{"
        written += part if is_count else f" {part}"
    return written.strip() or '""'


def _class_end(pattern: str, start: int) -> int:
    """Return the place after the class that begins at `start`; classes may nest."""
    depth, place = 0, start
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 1
        elif char == "[":
            depth += 1
            place += pattern[place + 1 : place + 2] == "^"
            place += pattern[place + 1 : place + 2] == "]"
        elif char == "]":
            depth -= 1
            if not depth:
                return place + 1
        place += 1
    raise _impossible("a class without an end")


def _class(source: str, *, folds: bool = False) -> str:
    """Return the part for one character of a class."""
    try:
        own = regex.compile(_BRACED.sub(_unbraced, source), regex.V1 | (regex.I if folds else 0))
    except regex.error as error:
        raise _impossible(f"the class {source}") from error
    short = "".join(_SHORT[char] for char in _SHORT if own.fullmatch(char))
    long = [char for char in _LONG if own.fullmatch(char)]
    spelled = [f"[{short}]"] if short else []
    if len(long) == len(_LONG):
        spelled.append(_ANY_LONG)
    else:
        spelled += [f"u{ord(char):04x}" for char in long]
    plain = _regex(f"[{source}&&{_PLAIN}]", folds=folds)
    return f"({plain} | /\\\\(?:{'|'.join(spelled)})/)" if spelled else plain


def _unbraced(found: re.Match[str]) -> str:
    """Return Rust's spelling of a character as `regex` reads it."""
    return f"\\U{found[1]:0>8}"


def _char(char: str, *, folds: bool = False) -> str:
    """Return the part for one character."""
    spelled = json.dumps(char, ensure_ascii=False)[1:-1]
    if folds and char.isalpha():
        return _regex(char, folds=True)
    return json.dumps(spelled, ensure_ascii=False)


def _regex(pattern: str, *, folds: bool) -> str:
    return f"/{_slashed(pattern)}/{'i' if folds else ''}"


def _slashed(pattern: str) -> str:
    return re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern)


def _denoted(atom: str) -> str:
    """Return the character that an atom of a pattern stands for."""
    if len(atom) == 1:
        return atom
    code = atom[2:].strip("{}")
    if atom[1] in "xu" and code:
        return chr(int(code, 16))
    return _CODES.get(atom[1], atom[1])


def _class_char(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"


def _impossible(what: str) -> InvalidRequestError:
    problem = f"a grammar of a custom tool cannot have {what}: this model writes inputs in JSON"
    return InvalidRequestError(problem, param="tools")
