"""The ``rlcore`` command."""


def main() -> None:
    """Entry point of the console script."""
    raise SystemExit("not there yet")
