"""What golden/ holds: ``python -m tests.golden.measure``."""

from __future__ import annotations

from collections import Counter

import flashcheck.golden.themes  # noqa: F401 - registers the groups
from flashcheck.golden import files
from flashcheck.golden.entry import GROUPS
from tests.golden.conftest import FOLDER


def main() -> None:
    formats: Counter[str] = Counter()
    flags: Counter[str] = Counter()
    print(f"{'group':15} {'problems':>8} {'with gradients':>14} {'values':>8} {'json kB':>8}")
    total = Counter[str]()
    for name in GROUPS:
        problems = files.read_group(FOLDER, name)["problems"]
        values = sum(len(x["digits"].split()) for p in problems for x in p["expected"].values())
        size = files.group_path(FOLDER, name).stat().st_size
        backward = sum("stored" in p for p in problems)
        print(f"{name:15} {len(problems):8} {backward:14} {values:8,} {size / 1e3:8.0f}")
        total.update(problems=len(problems), backward=backward, values=values)
        formats.update(p["inputs"]["q"]["format"] for p in problems)
        flags.update(flag for p in problems for flag in p["flags"])
    paths = [p for p in FOLDER.rglob("*") if p.is_file() and "certificates" not in p.parts]
    print(f"{'all':15} {total['problems']:8} {total['backward']:14} {total['values']:8,}")
    print(f"{sum(p.stat().st_size for p in paths) / 1e6:.1f} MB in {len(paths)} files")
    print(", ".join(f"{name} {count}" for name, count in formats.most_common()))
    print(", ".join(f"{name} {count}" for name, count in flags.most_common()))


if __name__ == "__main__":
    main()
