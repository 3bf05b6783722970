"""The command line. Thin: heavy imports happen inside the commands, so that help is immediate."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashcheck import __version__
from flashcheck.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

USAGE = 2
PLAN, REPRODUCE, DEVICES, OUTPUT = "Plan", "Reproduce", "Devices", "Output"

app = typer.Typer(
    name="flashcheck",
    help="Certifies flash-attention kernels against proved elementwise error bounds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashcheck {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


NoColor = Annotated[bool, typer.Option("--no-color", help="Plain text.", rich_help_panel=OUTPUT)]


@app.command()
def certify(
    kernels: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KERNEL]...",
            help="package.module:attribute, path/file.py:attribute or a built-in name; "
            "default: kernels in [tool.flashcheck] of ./pyproject.toml.",
        ),
    ] = None,
    level: Annotated[str | None, typer.Option(help="quick or standard.", rich_help_panel=PLAN)] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only this dtype; repeat for more.", rich_help_panel=PLAN)
    ] = None,
    max_cases: Annotated[
        int | None,
        typer.Option(min=1, help="Problems per dtype, in place of the level's.", rich_help_panel=PLAN),
    ] = None,
    max_time: Annotated[
        str | None, typer.Option(help="Stop after this long: 90s, 10m.", rich_help_panel=PLAN)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of all random draws; fixed by default.", rich_help_panel=REPRODUCE)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:N].", rich_help_panel=DEVICES)] = None,
    out: Annotated[
        Path | None, typer.Option(help="The certificate's file.", dir_okay=False, rich_help_panel=OUTPUT)
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Margins per value family.", rich_help_panel=OUTPUT)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only the last lines.", rich_help_panel=OUTPUT)
    ] = False,
    no_color: NoColor = False,
) -> None:
    """Judge kernels and write a certificate.

    Exit code: 0 certified, 1 rejected, 2 wrong usage, 3 incomplete, 4 the judge failed, 130 interrupted.
    """
    from flashcheck.commands import CertifyRequest, run_certify

    request = CertifyRequest(
        kernels=tuple(kernels or ()),
        level=level,
        dtypes=tuple(dtype or ()),
        max_cases=max_cases,
        max_time=max_time,
        seed=seed,
        out=out,
        device=device,
        verbose=verbose,
        quiet=quiet,
    )
    raise typer.Exit(run_certify(request, *_consoles(no_color)))


@app.command("list")
def list_(
    what: Annotated[
        str | None, typer.Argument(metavar="[WHAT]", help="kernels, checks, values or formats; default: all.")
    ] = None,
    no_color: NoColor = False,
) -> None:
    """Show known kernels, checks, value families and formats."""
    from flashcheck.devices import interpret_without_gpu
    from flashcheck.listing import run_list

    interpret_without_gpu()
    raise typer.Exit(run_list(what, _consoles(no_color)[0]))


@app.command()
def audit(no_color: NoColor = False) -> None:
    """Run every seeded fault and show who caught it.

    Exit code: 0 all caught, 1 one survived or the control was rejected.
    """
    from flashcheck.commands import run_audit

    raise typer.Exit(run_audit(_consoles(no_color)[0]))


def _consoles(no_color: bool) -> tuple[Console, Console]:
    """stdout for results, stderr for progress."""
    from rich.console import Console

    plain = no_color or bool(os.environ.get("NO_COLOR"))
    wide = None if sys.stdout.isatty() else 160  # a pipe has no width; tables must not be cut
    return Console(no_color=plain, width=wide), Console(stderr=True, no_color=plain)


def main() -> None:
    """Entry point: an argument outside its legal set is one line on stderr and exit code 2."""
    try:
        app()
    except ArgumentError as error:
        typer.echo(f"flashcheck: {error}", err=True)
        sys.exit(USAGE)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
