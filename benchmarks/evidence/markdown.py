"""Markdown pages: a file holds the prose and the tables' columns, code fills in the figures.

Figures are placeholders of str.format. A line `name: | {cell} | {cell} |` is a table's row for each record of `name`,
or for the one record that it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Values = Mapping[str, Any]
"""By placeholder: a figure, a record of figures, or a sequence of records."""

_HEADING, _ROW = re.compile(r"^(?=#+ )", re.MULTILINE), re.compile(r"(\w+): \|(.*)\|")


def fill(page: str, values: Values) -> str:
    """The page; a section, from its heading to the next one, is left out if one of its values is missing."""
    return re.sub(r"\n{3,}", "\n\n", "".join(_section(text, values) for text in _HEADING.split(page))).strip() + "\n"


def _section(text: str, values: Values) -> str:
    try:
        return "\n".join(line for template in text.split("\n") for line in _lines(template, values))
    except KeyError:
        return ""


def _lines(template: str, values: Values) -> Iterator[str]:
    row = _ROW.fullmatch(template)
    if row is None:
        yield template.format_map(values)
        return
    records = values[row[1]]
    for record in [records] if isinstance(records, Mapping) else records:
        cells = [_cell(cell.strip(), record) for cell in row[2].split("|")]
        if any(cells[1:]):  # a row of nothing but its name is left out
            yield table_row(cells)


def table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(template: str, record: Values) -> str:
    """Empty where the record lacks a figure, or has None that the format cannot show."""
    try:
        return template.format_map(record)
    except (KeyError, TypeError):
        return ""
