"""Tables of the commands: columns are declared once, and written as Markdown or on the terminal."""

from typing import Any

from rich.text import Text

from specexport.report import Column, markdown_table, terminal_table

ROWS: list[dict[str, Any]] = [{"name": "a", "rate": 1.25, "gain": None}, {"name": "bc", "rate": 10.0, "gain": 0.5}]


def columns(*, gains: bool = True) -> list[Column[dict[str, Any]]]:
    return [
        Column("name", lambda row: row["name"], left=True),
        Column("tokens/s", lambda row: row["rate"], ".1f"),
        Column("gain", lambda row: row["gain"], ".0%", " ±", shown=gains),
    ]


def test_markdown_has_numbers_at_the_right_and_a_dash_where_there_is_none() -> None:
    assert markdown_table(columns(), ROWS).splitlines() == [
        "| name | tokens/s |  gain |",
        "| ---- | -------: | ----: |",
        "| a    |      1.2 |     - |",
        "| bc   |     10.0 | 50% ± |",
    ]


def test_a_column_that_is_not_shown_is_in_no_table() -> None:
    assert "gain" not in markdown_table(columns(gains=False), ROWS)
    assert [column.header for column in terminal_table(columns(gains=False), ROWS).columns] == ["name", "tokens/s"]


def test_a_terminal_gets_styled_cells_row_by_row() -> None:
    made: list[str] = []

    def rows() -> Any:
        for row in ROWS:
            yield row
            made.append(row["name"])

    seen: Column[dict[str, Any]] = Column("seen", lambda row: Text(f"{row['name']} after {len(made)}", "green"))
    (table,) = terminal_table([seen], rows()).columns
    assert [str(cell) for cell in table.cells] == ["a after 0", "bc after 1"]
