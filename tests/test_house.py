"""The house stays small and plain: sizes of files, circles of imports, and names.

Each list may only shrink: a line that is no exception any more must go.
"""

from collections import Counter

import pytest

from tests import house

MOST_LINES = 500
NUM_SMALL_FILES = {"legato": 61, "legato_fleet": 6, "legato_lab": 19}
"""Modules of at most 60 lines: each is one more stop on a reader's way. Key the package."""
SHARED_MODULE_NAMES = """
cache client comparison completion config context decoder divided embedding engine engine_process
errors experts first_pass fleet host_cache linear link logprobs lookup models plots policy pooling
prompts recurrence replica request rope rotation rows sampler search
settings source support tables trace transfers trial vocabulary
"""
"""Beside `main`: each program has one."""


def test_no_file_is_long() -> None:
    long = {
        module: num_lines
        for module, path in house.modules().items()
        if (num_lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert not long


@pytest.mark.parametrize("package", house.DISTRIBUTIONS)
def test_small_files_become_no_more(package: str) -> None:
    small = [
        module
        for module, path in house.modules().items()
        if house.package(module) == package
        and path.name != "__init__.py"
        and len(path.read_text().splitlines()) <= 60
    ]
    assert len(small) <= NUM_SMALL_FILES[package], small
    assert len(small) == NUM_SMALL_FILES[package], "fewer: lower the number"


def test_imports_have_no_circles() -> None:
    assert not house.circles()


def test_a_class_has_a_name_of_its_own() -> None:
    shared = {name for name, modules in house.classes().items() if len(modules) > 1}
    assert not shared


def test_a_module_has_a_name_of_its_own() -> None:
    stems = Counter(path.stem for path in house.sources() if path.name != "__init__.py")
    assert {stem for stem, count in stems.items() if count > 1} - {"main"} == set(
        SHARED_MODULE_NAMES.split()
    )
