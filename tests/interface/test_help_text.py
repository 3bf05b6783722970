"""Help says what its author wrote: rich takes words in brackets for styles and drops them."""

from __future__ import annotations

from collections.abc import Iterator

import click
import typer
from rich.markup import render

from flashcheck.cli import app


def _texts(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    yield path, command.help or ""
    for parameter in command.params:
        yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
    for name, child in getattr(command, "commands", {}).items():
        yield from _texts(child, f"{path} {name}")


def test_no_word_of_a_help_text_is_lost() -> None:
    texts = dict(_texts(typer.main.get_command(app), "flashcheck"))
    assert len(texts) > 50
    lost = {path: text for path, text in texts.items() if render(text).plain != text}
    assert not lost
