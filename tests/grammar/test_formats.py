"""Patterns beside formats, against the calendar."""

import calendar
import re

from legato.language.forms.source import with_strict_formats


def test_each_year_has_the_days_that_it_has() -> None:
    [beside] = with_strict_formats({"format": "date"})["allOf"]
    for year in range(10_000):
        leap_day = re.search(beside["pattern"], f"{year:04}-02-29") is not None
        assert leap_day == calendar.isleap(year), year
    days = [f"2023-{month:02}-{day:02}" for month in range(1, 13) for day in range(1, 29)]
    assert all(re.search(beside["pattern"], day) for day in (*days, "2023-01-31", "2023-11-30"))


def test_formats_are_found_wherever_schemas_are_and_nowhere_else() -> None:
    date = {"format": "date"}
    strict = with_strict_formats(date)
    for schema, made in (
        ({"properties": {"format": date}}, {"properties": {"format": strict}}),
        ({"items": {"anyOf": [date, {}]}}, {"items": {"anyOf": [strict, {}]}}),
        ({"const": date, "enum": [date]}, {"const": date, "enum": [date]}),
        ({"allOf": [{}], "format": "date"}, {"allOf": [{}, *strict["allOf"]], "format": "date"}),
        ({"format": "uuid"}, {"format": "uuid"}),
        ({"format": ["date"]}, {"format": ["date"]}),
        ({"format": "date", "allOf": 3}, {"format": "date", "allOf": 3}),
        (True, True),
    ):
        assert with_strict_formats(schema) == made
