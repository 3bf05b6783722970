"""``python -m flashcheck``."""

from flashcheck.cli import main

main()
