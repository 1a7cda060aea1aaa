"""``python -m rlcore``."""

from rlcore.cli import main

main()
