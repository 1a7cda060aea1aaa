"""CPU time of the start, interpreter included: ``python benchmarks/startup.py [--json]``.

User and system time of whole processes (the best of several: everything else is the machine's business), and which heavy
modules each one has loaded. Exit status 1 if a bound is exceeded.
"""

import argparse
import json
import os
import resource
import subprocess
import sys

BOUNDS = {"import rlcore": 80, "rlcore --help": 250, "rlcore plugins": 450}
"""Milliseconds."""

HEAVY = ("torch", "ray", "openai", "transformers", "numpy", "pyarrow", "pydantic", "rich")

CODE = {
    "import rlcore": "import rlcore",
    "rlcore --help": "from rlcore.cli import main; main(['--help'])",
    "rlcore plugins": "from rlcore.cli import main; main(['plugins'])",
}


def cpu_ms(code: str) -> float:
    """User and system time of one process that runs ``code``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def loaded(code: str) -> list[str]:
    """The heavy modules that ``code`` leaves loaded."""
    probe = f"import atexit, sys; atexit.register(lambda: print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr))"
    done = subprocess.run([sys.executable, "-c", f"{probe}\n{code}"], check=True, capture_output=True, text=True)
    return [name for name in HEAVY if f"'{name}'" in done.stderr.splitlines()[-1]]


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.pop("RLCORE_PLUGINS", None)
    report = {}
    for what, bound in BOUNDS.items():
        cpu_ms(CODE[what])  # fills the file cache and writes bytecode
        times = sorted(cpu_ms(CODE[what]) for _ in range(options.runs))
        report[what] = {
            "best_ms": round(times[0], 1),
            "median_ms": round(times[len(times) // 2], 1),
            "bound_ms": bound,
            "heavy": loaded(CODE[what]),
        }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        for what, row in report.items():
            heavy = ", ".join(row["heavy"]) or "none"
            print(
                f"{what:<16} best {row['best_ms']:6.1f} ms  median {row['median_ms']:6.1f}  bound {row['bound_ms']}  heavy: {heavy}"
            )
    return int(any(row["best_ms"] > row["bound_ms"] for row in report.values()))


if __name__ == "__main__":
    sys.exit(main())
