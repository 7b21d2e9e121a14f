"""Flags from a YAML file.

A key is a flag's name without the dashes in front; it may lie below a heading of `--help`. A list
stands for a flag that is repeated, and a mapping for NAME=VALUE, or for a class of service.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from legato.cli.foreign_flags import unknown_flag
from legato.core.errors import ConfigError

_BOOL = "tag:yaml.org,2002:bool"
_NULL = "tag:yaml.org,2002:null"
_NOT_IN_FILES = ("--config", "--help")


class ConfigEntry(msgspec.Struct, frozen=True):
    """One key of a file.

    Attributes:
        option: the flag, with its dashes.
        arguments: as they would be typed.
        place: file and line, for errors.
    """

    option: str
    arguments: list[str]
    place: str


def read_config_file(path: str, parser: argparse.ArgumentParser) -> list[ConfigEntry]:
    """Return all flags of a file.

    Args:
        parser: defines the flags and headings.

    Raises:
        ConfigError: the file cannot be read, has a key that is no flag, or has a flag twice.
    """
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if root is None:
        return []
    entries = list(_File(path, parser).entries(root))
    _refuse_repeated(entries)
    return entries


def _refuse_repeated(entries: list[ConfigEntry]) -> None:
    places: dict[str, str] = {}
    for entry in entries:
        if entry.option in places:
            raise ConfigError(f"{entry.place}: {entry.option} is set on {places[entry.option]} too")
        places[entry.option] = entry.place


class _File:
    """Reads the keys of one file as flags of one parser."""

    def __init__(self, path: str, parser: argparse.ArgumentParser) -> None:
        self._path = path
        self._actions = {
            option: action
            for option, action in parser._option_string_actions.items()
            if option.startswith("--") and option not in _NOT_IN_FILES
        }
        self._headings = {
            _spelt(group.title) for group in parser._action_groups if group.title is not None
        }

    def entries(self, root: Node) -> Iterator[ConfigEntry]:
        for name, key, value in self._items(root):
            # A word can be both, such as model.
            is_flag = f"--{name}" in self._actions and not isinstance(value, MappingNode)
            if is_flag or name not in self._headings:
                yield self._entry(name, key, value)
            elif value.tag != _NULL:  # all flags below it may be comments
                for inner, inner_key, inner_value in self._items(value):
                    yield self._entry(inner, inner_key, inner_value)

    def _items(self, node: Node) -> Iterator[tuple[str, Node, Node]]:
        """Yield each name, with the nodes of its key and value."""
        if not isinstance(node, MappingNode):
            raise ConfigError(f"{self._place(node)}: this is to be a mapping of flags to values")
        for key, value in node.value:
            yield _spelt(self._text(key)), key, value

    def _entry(self, name: str, key: Node, value: Node) -> ConfigEntry:
        option = f"--{name}"
        if option not in self._actions:
            headings = (f"--{heading}" for heading in self._headings)
            problem = unknown_flag(option, [*self._actions, *headings])
            raise ConfigError(f"{self._place(key)}: {problem}")
        return ConfigEntry(option, self._arguments(option, value), self._place(key))

    def _arguments(self, option: str, value: Node) -> list[str]:
        if value.tag == _NULL:
            return []  # as if the key were missing
        if self._actions[option].nargs == 0:
            return self._switch(option, value)
        values = value.value if isinstance(value, SequenceNode) else [value]
        return [f"{option}={text}" for item in values for text in self._texts(item)]

    def _switch(self, option: str, value: Node) -> list[str]:
        if value.tag != _BOOL:
            raise ConfigError(f"{self._place(value)}: {option} is true or false")
        if yaml.SafeLoader.bool_values[self._text(value).lower()]:
            return [option]
        negated = option.replace("--", "--no-", 1)
        return [negated] if negated in self._actions else []

    def _texts(self, value: Node) -> list[str]:
        """Return values as they would be typed; of a mapping, one for each item."""
        if not isinstance(value, MappingNode):
            return [self._text(value)]
        return [self._item(self._text(key), inner) for key, inner in value.value]

    def _item(self, name: str, value: Node) -> str:
        if not isinstance(value, MappingNode):
            return f"{name}={self._text(value)}"
        parts = (f"{self._text(key)}={self._text(inner)}" for key, inner in value.value)
        return f"{name}:{','.join(parts)}"

    def _text(self, node: Node) -> str:
        """Return a scalar as written; its flag interprets it."""
        if not isinstance(node, ScalarNode):
            raise ConfigError(f"{self._place(node)}: this is to be a single value")
        return str(node.value)

    def _place(self, node: Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"


def _spelt(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")
