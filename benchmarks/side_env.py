"""A side environment for what rlcore is compared with: it sees this environment's packages and never changes it.

python benchmarks/side_env.py            # makes benchmarks/.venv-trl if it is not as it should be; prints its interpreter
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / ".venv-trl"
PACKAGES = ["trl==1.16.0", "accelerate", "datasets", "dill", "multiprocess", "xxhash", "pandas", "aiohttp"]
"""Installed without their dependencies; the rest comes from the environment that runs this."""


def ensure(folder: Path = FOLDER, packages: list[str] = PACKAGES) -> Path:
    """The interpreter of an environment with ``packages`` in it; made if it is not there, by one process at a time."""
    python = folder / "bin" / "python"
    stamp = folder / "made-for.json"
    wanted = {"packages": packages, "base": sysconfig.get_path("purelib"), "python": sys.version}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if python.exists() and stamp.exists() and json.loads(stamp.read_text()) == wanted:
            return python
        print(f"making {folder} …", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", folder], check=True)
        (own,) = folder.glob("lib/python*/site-packages")
        # a site directory, not a plain path: editable installs are seen too
        (own / "base-environment.pth").write_text(f"import site; site.addsitedir({wanted['base']!r})\n")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", *packages]
        subprocess.run([*map(str, pip)], check=True)
        stamp.write_text(json.dumps(wanted))
    return python


if __name__ == "__main__":
    print(ensure())
