"""Between the training process and the sandbox: joins the control groups, gives up root, becomes bubblewrap.

Runs as ``python -I -S launch.py JSON`` so that the training process, which is large, is never forked to run Python code.
"""

import json
import os
import sys


def main() -> None:
    """Apply the settings to this process and replace it."""
    settings = json.loads(sys.argv[1])
    for path in settings["cgroups"]:
        with open(path, "w") as file:
            file.write(str(os.getpid()))
    if settings["cores"] is not None:
        os.sched_setaffinity(0, settings["cores"])
    if settings["uid"] is not None:
        os.setgroups([])
        os.setresgid(settings["uid"], settings["uid"], settings["uid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    os.execv(settings["argv"][0], settings["argv"])


if __name__ == "__main__":
    main()
