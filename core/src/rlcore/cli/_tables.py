"""Tables: aligned plain text, and drawn by rich only where somebody looks at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["print_table"]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; columns whose cells are all numbers stand right. Nothing is cut off without a terminal."""
    right = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold")
        for column, is_right in zip(columns, right, strict=True):
            table.add_column(column, justify="right" if is_right else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
    print(title)
    for row in [columns, *rows]:
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ]
        print(f"  {'  '.join(cells)}".rstrip())
    print()


def _is_number(text: str) -> bool:
    return text.strip("-").replace(",", "").replace(".", "").replace("%", "").isdigit() or text in ("", "-")
