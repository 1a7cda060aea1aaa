"""Between the training process and the sandbox: joins the control groups, gives up root, becomes bubblewrap.

Runs as ``python -I -S launch.py JSON`` so that the training process, which is large, is never forked to run Python code.

Bubblewrap ends with its parent, but not in the moments in which its child waits to be set up: a training process that is
killed just then would leave that child waiting for ever. So a guard stands by until the sandbox is ready.
"""

import contextlib
import json
import os
import signal
import sys
import time


def guard(fd: int, group: int, folders: list[str]) -> None:
    """Read one byte: the sandbox is ready. The end of the pipe without it: nobody waits, so end what was begun."""
    os.setsid()
    os.closerange(0, fd)
    os.closerange(fd + 1, 4096)
    if os.read(fd, 1):
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for folder in folders:
        for _ in range(50):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.02)


def main() -> None:
    """Apply the settings to this process and replace it."""
    settings = json.loads(sys.argv[1])
    fd, launcher = settings["guard"], os.getpid()
    if fd is not None:
        if os.fork() == 0:
            if os.fork() == 0:
                guard(fd, launcher, [os.path.dirname(path) for path in settings["cgroups"]])
            os._exit(0)
        os.wait()
        os.close(fd)
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
