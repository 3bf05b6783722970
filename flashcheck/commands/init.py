"""Writes starter files into a user's repository; never over something that is there."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flashcheck.errors import ArgumentError

STARTER = Path(__file__).parents[1] / "report" / "starter"
DEFAULT_KERNEL = "your_package.your_module:attention"
DEFAULT_ACTION = "flashcheck/flashcheck@v0.1.0"


def run_init(folder: Path, kernel: str | None, action: str, stdout: Console) -> int:
    """0; says of every file whether it was written or was there."""
    if not folder.is_dir():
        raise ArgumentError("DIR", folder, "a folder that exists")
    name = kernel or DEFAULT_KERNEL
    if ":" not in name and not name.startswith("torch."):
        raise ArgumentError("--kernel", name, "package.module:attribute or path/file.py:attribute")
    values = {"@KERNEL@": name, "@ACTION@": action}
    for target, source in (
        ("tests/test_attention_numerics.py", "test_attention_numerics.py.txt"),
        (".github/workflows/flashcheck.yml", "workflow.yml.txt"),
    ):
        text = (STARTER / source).read_text(encoding="utf-8")
        for mark, value in values.items():
            text = text.replace(mark, value)
        _say(stdout, target, _create(folder / target, text))
    _say(stdout, "pyproject.toml [tool.flashcheck]", _add_table(folder / "pyproject.toml", name))
    if kernel is None:
        stdout.print(Text(f"Put your kernel's name in place of {DEFAULT_KERNEL}."), soft_wrap=True)
    stdout.print("next   flashcheck certify --level quick", highlight=False)
    return 0


def _create(path: Path, text: str) -> bool:
    """True where the file was not there and is now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    return True


def _add_table(path: Path, kernel: str) -> bool:
    """Appends ``[tool.flashcheck]``; what the file holds stays as it is, byte for byte."""
    table = f'[tool.flashcheck]\nkernels = ["{kernel}"]\nlevel = "standard"\n'
    if not path.exists():
        return _create(path, table)
    text = path.read_text(encoding="utf-8")
    try:
        known = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError("pyproject.toml", path, f"valid TOML ({error})") from None
    if "flashcheck" in known.get("tool", {}):
        return False
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if text.endswith("\n") or not text else "\n") + "\n" + table)
    return True


def _say(stdout: Console, name: str, written: bool) -> None:
    word, style = ("wrote", "green") if written else ("kept ", "yellow")
    line = Text(word, style=style)
    line.append(f"  {name}" + ("" if written else " (was there)"), style="default")
    stdout.print(line, soft_wrap=True)
