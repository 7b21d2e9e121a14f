"""What docstrings say, by section."""

import inspect
import re
from dataclasses import dataclass

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_ITEM = re.compile(r" {4}(\w+(?:, \w+)*)(?: \((.+?)\))?: (.*)")


@dataclass(frozen=True)
class Entry:
    """What a section says of a name; `type` is there where the code cannot tell it."""

    words: str
    type: str | None = None


@dataclass(frozen=True)
class Docstring:
    """A docstring in Google's style.

    Attributes:
        body: what is in no section.
        sections: key the section's name, then the name of what it explains.
    """

    body: str
    sections: dict[str, dict[str, Entry]]

    def entries(self, section: str) -> dict[str, Entry]:
        return self.sections.get(section, {})

    def words(self, section: str) -> dict[str, str]:
        return {name: entry.words for name, entry in self.entries(section).items()}


def parse(text: str | None) -> Docstring:
    """Names that share their words, as in `a, b: what they are`, get them each."""
    body: list[str] = []
    sections: dict[str, dict[str, Entry]] = {}
    section: dict[str, Entry] | None = None
    names: list[str] = []
    for line in inspect.cleandoc(text or "").splitlines():
        if heading := _SECTION.fullmatch(line):
            section = sections.setdefault(heading[1], {})
        elif section is None or (line and not line.startswith(" ")):
            section = None
            body.append(line)
        elif item := _ITEM.fullmatch(line):
            names = item[1].split(", ")
            section.update(dict.fromkeys(names, Entry(item[3], item[2])))
        elif line:
            for name in names:
                entry = section[name]
                section[name] = Entry(f"{entry.words} {line.strip()}", entry.type)
    return Docstring("\n".join(body).strip(), sections)
