"""Tables in Markdown, printed line by line as they come to be."""

from __future__ import annotations


def print_head(*names: str) -> None:
    """Print the names of the columns."""
    print_row(*names)
    print_row(*["---"] * len(names))


def print_row(*cells: object) -> None:
    """Print one line."""
    print("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |", flush=True)
