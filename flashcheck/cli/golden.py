"""``flashcheck golden``: its commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashcheck.cli.app import DEVICES, OUTPUT, NoColor, app, consoles

golden = typer.Typer(
    name="golden",
    help="Golden vectors: problems with answers to 30 digits, for kernels in any language.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(golden)

Folder = Annotated[
    Path, typer.Option("--folder", help="Where the vectors lie.", file_okay=False, rich_help_panel=OUTPUT)
]
GOLDEN = Path("golden")


@golden.command()
def make(folder: Folder = GOLDEN, no_color: NoColor = False) -> None:
    """Make the vectors anew from their seeds, bit for bit.

    Needs python-flint (flashcheck's extra "golden"). Exit code: 0, or 130 where interrupted; a second run
    goes on where the first one stopped.
    """
    from flashcheck.commands.golden import run_make

    raise typer.Exit(run_make(folder, *consoles(no_color)))


@golden.command()
def verify(
    folder: Folder = GOLDEN,
    sample: Annotated[int, typer.Option(min=1, help="Problems to recompute.")] = 40,
    everything: Annotated[bool, typer.Option("--all", help="Recompute all of them.")] = False,
    seed: Annotated[int, typer.Option(help="Which sample.")] = 0,
    no_color: NoColor = False,
) -> None:
    """Recompute vectors by two independent routes and compare every digit.

    Exit code: 0 all agree, 1 something differs, 130 interrupted.
    """
    from flashcheck.commands.golden import run_verify

    raise typer.Exit(run_verify(folder, None if everything else sample, seed, *consoles(no_color)))


@golden.command()
def run(
    kernel: Annotated[
        str,
        typer.Argument(metavar="KERNEL", help="package.module:attribute, path/file.py:attribute or a name."),
    ],
    folder: Folder = GOLDEN,
    group: Annotated[list[str] | None, typer.Option(help="Only this group; repeat for more.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:N].", rich_help_panel=DEVICES)] = None,
    no_color: NoColor = False,
) -> None:
    """Run a kernel on the vectors and judge it by the stored bounds.

    Problems that the kernel does not declare are counted as not applicable.
    Exit code: 0 all inside their bounds, 1 something outside, 3 nothing was judged, 130 interrupted.
    """
    from flashcheck.commands.golden import run_kernel

    raise typer.Exit(run_kernel(kernel, folder, tuple(group or ()), device, *consoles(no_color)))
