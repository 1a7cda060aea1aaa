"""The local backend: bubblewrap around a small agent, or (asked for by name) plain processes without isolation."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import ConfigError, InfraError, SandboxLost
from rlcore.sandbox_tools import close_all, finished, process_start
from rlcore.types import Problem, SandboxInfo, SandboxSpec

from rlcore_local.channel import MAX_HEADER, Channel
from rlcore_local.limits import ControlGroup
from rlcore_local.records import Record, Records
from rlcore_local.sandbox import LocalSandbox, kill_group

__all__ = ["LocalBackend", "preflight"]

log = logging.getLogger("rlcore.local")

HERE = Path(__file__).parent
UNPRIVILEGED = 65533
"""What root becomes before bubblewrap starts; no account of any distribution has this id."""
FOLDERS = ("/workspace", "/tests", "/logs", "/solution", "/tmp", "/var/tmp", "/root", "/opt", "/run", "/etc")
FROM_ETC = (
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "ssl",
    "ca-certificates",
    "localtime",
    "mime.types",
)
BOOTSTRAP = (
    "import os\ns=b''\nwhile len(s)<{size}:\n d=os.read(0,{size}-len(s))\n if not d:os._exit(71)\n s+=d\n"
    "exec(compile(s,'agent','exec'),{{'__name__':'__main__'}})"
)
NOT_ISOLATED = (
    'sandbox.isolation = "process": commands run as plain processes of this user. NOT isolated: they can read and change '
    "every file of this user, see and end its processes, reach the network, and use all memory, processors and disk. "
    "Only files written through rlcore stay in a private folder; absolute paths in commands are this machine's."
)
REMEDY = (
    "install it (apt-get install bubblewrap, dnf install bubblewrap), allow user namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0; inside a container run it "
    'with --privileged), use another backend (sandbox.name = "docker"), or accept no isolation at all with '
    'sandbox.isolation = "process"'
)


@dataclass(frozen=True)
class _Machine:
    """How sandboxes can be started here: found once per backend by a trial run."""

    bwrap: str
    flags: tuple[str, ...]
    uid: int | None
    python: str
    binds: tuple[str, ...]


@dataclass
class _Started:
    """What a start has made so far, so that a cancel at any await can take it back."""

    process: asyncio.subprocess.Process | None = None
    channel: Channel | None = None
    cgroup: ControlGroup = field(default_factory=ControlGroup)
    folder: str | None = None
    info: int | None = None
    guard: int | None = None

    def take_inner(self) -> int | None:
        """A descriptor of process 1 inside, once the sandbox is ready; ``None`` without bubblewrap."""
        assert self.info is not None
        text = os.read(self.info, 4096)
        return os.pidfd_open(json.loads(text)["child-pid"]) if text else None


class LocalBackend:
    """Sandboxes on this machine.

    With bubblewrap each sandbox has its own process, network, user and mount namespaces, a root file system in memory of
    bounded size, the host's ``/usr`` read-only, no capabilities and nothing of the host's environment, homes or network.
    It has one user: the numeric ``user`` of its spec, 1000 by default; another one per command is a ``ConfigError``.
    """

    class Config(BaseModel):
        """Options of ``sandbox.name = "local"``."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        isolation: Literal["bubblewrap", "process"] = Field(
            "bubblewrap", description="process: plain processes, nothing is isolated; only where you trust the commands"
        )
        memory_mb: int = Field(1024, ge=32, description="memory of a sandbox whose task names none, in MiB")
        disk_mb: int = Field(512, ge=1, description="writable space of a sandbox whose task names none, in MiB")
        cpus: float | None = Field(
            None, gt=0, description="CPU cores of a sandbox whose task names none; null: no limit"
        )
        pids: int = Field(256, ge=16, description="processes in a sandbox")
        ignore_image: bool = Field(
            False, description="run tasks that name an image or a Dockerfile on this machine's /usr instead"
        )
        bwrap: str = Field("bwrap", description="name or path of bubblewrap")
        start_seconds: float = Field(30.0, gt=0, description="a sandbox that is not ready by then is given up")
        max_download_mb: int = Field(1024, ge=1, description="largest folder that is copied out of a sandbox, in MiB")
        state_dir: str | None = Field(None, description="folder of records; default /tmp/rlcore-local-UID")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.isolated = config.isolation != "process"
        self.lacks = {"users": "a user namespace that needs no privileges holds one user; set it with the task's user"}
        self._records = Records(config.state_dir)
        self._machine: _Machine | None = None
        self._open: set[LocalSandbox] = set()
        self._warned: set[str] = set()

    async def start(self, spec: SandboxSpec) -> LocalSandbox:
        """Create a sandbox and wait until commands can run.

        Raises ``ConfigError`` where bubblewrap is missing or cannot run and for a spec that this backend cannot give
        (an image without ``ignore_image``), ``InfraError`` for a failed start.
        """
        self._check(spec)
        if self.config.isolation == "bubblewrap" and self._machine is None:
            self._machine = await asyncio.to_thread(probe, self.config.bwrap)
            await asyncio.to_thread(lambda: list(self._records.live()))  # clears away what dead runs left
            if "--disable-userns" not in self._machine.flags:
                self._warn("this bubblewrap is older than 0.8: commands in the sandbox can make user namespaces")
        sandbox_id = f"local-{secrets.token_hex(8)}"
        made = _Started()
        try:
            async with asyncio.timeout(self.config.start_seconds):
                sandbox = await self._start(sandbox_id, spec, made)
        except TimeoutError:
            await finished(asyncio.ensure_future(self._undo(sandbox_id, made)))
            raise InfraError(f"the sandbox was not ready after {self.config.start_seconds:g} s") from None
        except BaseException:
            await finished(asyncio.ensure_future(self._undo(sandbox_id, made)))
            raise
        finally:
            for fd in (made.info, made.guard):
                if fd is not None:
                    os.close(fd)
        self._open.add(sandbox)
        return sandbox

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Live sandboxes of this user on this machine, whichever process started them."""
        return [
            SandboxInfo(id=record.id, labels=record.labels, created=record.created)
            for record in self._records.live()
            if all(record.labels.get(key) == value for key, value in labels.items())
        ]

    async def delete(self, sandbox_id: str) -> None:
        """End a sandbox by id, also one of another process; unknown ids are fine."""
        for sandbox in self._open:
            if sandbox.id == sandbox_id:
                await sandbox.close()
                return
        record = self._records.get(sandbox_id)
        if record is not None:
            await asyncio.to_thread(self._records.end, record)

    async def aclose(self) -> None:
        """Close every sandbox that this backend started."""
        await close_all(list(self._open))

    def _check(self, spec: SandboxSpec) -> None:
        wanted = spec.image or spec.build_context
        if wanted and not self.config.ignore_image:
            raise ConfigError(
                f"the task asks for the image {wanted!r}, and the local sandbox has no images: use another backend "
                '(sandbox.name = "docker"), or run it on this machine\'s /usr with sandbox.ignore_image = true'
            )
        if spec.workdir is not None and not spec.workdir.startswith("/"):
            raise ConfigError(f"the sandbox's workdir must be absolute, not {spec.workdir!r}")
        for name in ("cpus", "memory_mb", "disk_mb", "lifetime_s"):
            value = getattr(spec, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"the sandbox's {name} must be a number above 0, not {value!r}")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text)

    async def _start(self, sandbox_id: str, spec: SandboxSpec, made: _Started) -> LocalSandbox:
        records = self._records.prepare()
        memory = (spec.memory_mb or self.config.memory_mb) * 1024 * 1024
        disk = (spec.disk_mb or self.config.disk_mb) * 1024 * 1024
        cpus = spec.cpus or self.config.cpus
        rlimits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": disk, "RLIMIT_NOFILE": 4096}
        conf: dict[str, Any] = {"rlimits": rlimits, "files": {}}
        cores = None
        name, uid = _user(spec.user)
        home = "/root" if uid == 0 else f"/home/{name}"
        if self.config.isolation == "bubblewrap":
            assert self._machine is not None
            made.cgroup = ControlGroup.create(sandbox_id, memory=memory, pids=self.config.pids, cpus=cpus)
            if not made.cgroup.folders:
                self._warn("control groups are not to be had here: memory is limited per process, by RLIMIT_DATA")
                rlimits.update(RLIMIT_DATA=memory, RLIMIT_NPROC=self.config.pids)
                if cpus is not None:
                    available = sorted(os.sched_getaffinity(0))
                    cores = available[: max(1, min(len(available), round(cpus)))]
            conf.update(folders=[*FOLDERS, home], scratch="/tmp", workdir=spec.workdir or "/workspace")
            conf["files"] = _etc(name, uid, home)
            argv = [*self._bubblewrap(spec, uid, disk), self._machine.python]
            drop = self._machine.uid
        else:
            self._warn(NOT_ISOLATED)
            made.folder = root = str(records / sandbox_id)
            mapped = ["workspace", "tests", "logs", "solution", "tmp", "home", "root"]
            home = f"{root}/home"
            workdir = root + (spec.workdir or "/workspace")
            conf.update(root=root, mapped=mapped, scratch=f"{root}/tmp", workdir=workdir)
            conf["folders"] = [*(f"{root}/{one}" for one in mapped), workdir]
            argv, drop, uid = [sys.executable], None, os.getuid()
        conf["folders"] = [*dict.fromkeys([*conf["folders"], conf["workdir"]])]
        conf["env"] = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": home,
            "USER": name,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            **({"RLCORE_SANDBOX": made.folder, "TMPDIR": conf["scratch"]} if made.folder else {}),
            **spec.env,
        }
        agent = _agent_source()
        settings = {
            "cgroups": made.cgroup.procs,
            "cores": cores,
            "uid": drop,
            "argv": [*argv, "-I", "-S", "-c", BOOTSTRAP.format(size=len(agent))],
        }
        process = await self._spawn(settings, made)
        assert process.stdin is not None
        process.stdin.write(agent + json.dumps(conf).encode() + b"\n")
        made.channel = Channel(process)
        try:
            await asyncio.shield(made.channel.ready.answer)
        except SandboxLost as error:
            raise InfraError(f"the sandbox did not start: {made.channel.complaints() or error}") from None
        record = Record(
            id=sandbox_id,
            pid=process.pid,
            started=process_start(process.pid) or 0,
            created=time.time(),
            labels=dict(spec.labels),
            cgroups=tuple(str(one) for one in made.cgroup.folders),
            folder=made.folder,
        )
        self._records.add(record)
        assert made.guard is not None
        os.write(made.guard, b"1")
        return LocalSandbox(
            sandbox_id,
            process=process,
            channel=made.channel,
            cgroup=made.cgroup,
            inner=made.take_inner(),
            user=(name, uid),
            max_download=self.config.max_download_mb * 1024 * 1024,
            on_closed=functools.partial(self._closed, record),
        )

    async def _spawn(self, settings: dict[str, Any], made: _Started) -> asyncio.subprocess.Process:
        """Start the process; with bubblewrap, ``made.info`` will say which process is process 1 inside."""
        made.info, info_write = os.pipe()
        guard_read, made.guard = os.pipe()
        settings["guard"] = guard_read
        try:
            if self.config.isolation == "bubblewrap":
                settings["argv"][1:1] = ["--info-fd", str(info_write)]
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    sys.executable,
                    "-I",
                    "-S",
                    str(HERE / "launch.py"),
                    json.dumps(settings),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    cwd="/",
                    pass_fds=(guard_read, info_write) if self.config.isolation == "bubblewrap" else (guard_read,),
                    start_new_session=True,
                    limit=MAX_HEADER,
                )
            )
            try:
                await finished(starting)
            finally:
                made.process = starting.result()
        finally:
            os.close(info_write)
            os.close(guard_read)
        return made.process

    def _bubblewrap(self, spec: SandboxSpec, uid: int, disk: int) -> list[str]:
        assert self._machine is not None
        network = ["--share-net", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"] if spec.network else []
        binds = [word for name in FROM_ETC for word in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")]
        return [
            self._machine.bwrap,
            *self._machine.flags,
            *("--uid", str(uid), "--gid", str(uid), "--hostname", "sandbox"),
            *("--size", str(disk), "--perms", "0755", "--tmpfs", "/"),
            *_system_folders(),
            *("--proc", "/proc", "--dev", "/dev", "--size", str(disk), "--perms", "1777", "--tmpfs", "/dev/shm"),
            *("--remount-ro", "/dev", "--perms", "1777", "--dir", "/tmp", "--perms", "1777", "--dir", "/var/tmp"),
            *("--perms", "0755", "--dir", "/etc"),
            *binds,
            *self._machine.binds,
            *network,
        ]

    async def _undo(self, sandbox_id: str, made: _Started) -> None:
        if made.process is not None:
            kill_group(made.process)
            await made.process.wait()
        if made.channel is not None:
            await made.channel.aclose()
        record = Record(sandbox_id, 0, -1, 0.0, cgroups=tuple(map(str, made.cgroup.folders)), folder=made.folder)
        await asyncio.to_thread(self._records.clear, record)

    async def _closed(self, record: Record, sandbox: LocalSandbox) -> None:
        self._open.discard(sandbox)
        await asyncio.to_thread(self._records.clear, record)


@functools.cache
def _agent_source() -> bytes:
    return (HERE / "agent.py").read_bytes()


def _user(user: str | int | None) -> tuple[str, int]:
    """Name and id of the sandbox's one user: names other than root get the id 1000."""
    if user is None:
        return "agent", 1000
    text = str(user)
    if text.isdigit():
        uid = int(text)
        return ("root" if uid == 0 else "agent"), uid
    if not text.replace("-", "_").isidentifier():
        raise ConfigError(f"the sandbox's user must be a name or a numeric id, not {user!r}")
    return text, 0 if text == "root" else 1000


def _etc(name: str, uid: int, home: str) -> dict[str, str]:
    users = [] if uid == 0 else ["root:x:0:0:root:/root:/bin/sh"]
    groups = [] if uid == 0 else ["root:x:0:"]
    users += [f"{name}:x:{uid}:{uid}::{home}:/bin/bash", "nobody:x:65534:65534::/nonexistent:/bin/false"]
    groups += [f"{name}:x:{uid}:", "nogroup:x:65534:"]
    return {
        "/etc/passwd": "\n".join(users) + "\n",
        "/etc/group": "\n".join(groups) + "\n",
        "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "/etc/hostname": "sandbox\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }


def _system_folders() -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name).lstrip("/"), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    return words


def _interpreter() -> tuple[str, list[str]]:
    """The Python that runs the agent, and what must be bound for it: the system's, else the one that runs us."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK):
            return path, []
    real = os.path.realpath(sys.executable)
    return real, ["--ro-bind", sys.base_prefix, sys.base_prefix]


def probe(bwrap: str) -> _Machine:
    """How bubblewrap runs here, by trying; ``ConfigError`` with the remedy where it does not."""
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"bubblewrap needs Linux, this is {sys.platform}: {REMEDY}")
    path = shutil.which(bwrap)
    if path is None:
        raise ConfigError(f"bubblewrap ({bwrap}) is not installed: {REMEDY}")
    helped = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=10).stdout
    flags = ["--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--die-with-parent", "--new-session", "--as-pid-1"]
    flags += ["--clearenv"] if "--clearenv" in helped else []
    flags += ["--disable-userns"] if "--disable-userns" in helped else []
    python, binds = _interpreter()
    system = [*_system_folders(), *binds, "--proc", "/proc", "--dev", "/dev", "--size", "1000000", "--tmpfs", "/tmp"]
    argv = [path, *flags, "--uid", "1000", "--gid", "1000", *system, python, "-I", "-S", "-c", "pass"]
    reason = ""
    for uid in (UNPRIVILEGED, None) if os.getuid() == 0 else (None,):
        settings = {"guard": None, "cgroups": [], "cores": None, "uid": uid, "argv": argv}
        tried = subprocess.run(
            [sys.executable, "-I", "-S", str(HERE / "launch.py"), json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={},
            timeout=20,
        )
        if tried.returncode == 0:
            return _Machine(path, tuple(flags), uid, python, tuple(binds))
        reason = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
    raise ConfigError(f"bubblewrap cannot run here ({reason}): {REMEDY}")


def preflight(section: Any) -> Sequence[Problem]:
    """The problem that would stop every sandbox of a run, if there is one."""
    options = section.options if hasattr(section, "options") else LocalBackend.Config()
    if getattr(options, "isolation", "bubblewrap") == "process":
        return (Problem("sandbox", NOT_ISOLATED, "install bubblewrap and drop sandbox.isolation", fatal=False),)
    try:
        probe(getattr(options, "bwrap", "bwrap"))
    except ConfigError as error:
        message, _, remedy = str(error).partition(": ")
        return (Problem("sandbox", message, remedy),)
    return ()
