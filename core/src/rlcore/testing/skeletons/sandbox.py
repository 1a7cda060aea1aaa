"""A sandbox backend: a bubblewrap namespace that commands enter by ``nsenter``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field

from rlcore.errors import ConfigError, InfraError, SandboxLost
from rlcore.sandbox_tools import close_all, finished
from rlcore.shell_sandbox import ShellSandbox
from rlcore.types import SandboxInfo, SandboxSpec

BWRAP = (
    "bwrap --die-with-parent --as-pid-1 --unshare-all --unshare-user --uid 1000 --gid 1000 --new-session --clearenv --ro-bind /usr /usr "
    "--symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc --dev /dev "
    "--perms 1777 --dir /tmp --perms 1777 --dir /var/tmp"
)
NSENTER = "nsenter --user --preserve-credentials --pid --mount --net --uts --ipc"
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/tmp"}


class Skeleton:
    """Starts a namespace per sandbox. Put your provider's calls in the place of ``Namespace``."""

    class Config(BaseModel):
        """Options of this backend."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        folder: str = Field(f"/tmp/namespaces-{os.getuid()}", description="folder of one file per live sandbox")

    lacks = {  # noqa: RUF012 - what the kit asks for and this backend cannot do, with the reason
        "users": "the namespace holds one user",
        "memory_limit": "there are no control groups",
        "process_limit": "there are no control groups",
        "disk_limit": "the file system in memory has no size",
        "killing_everything": "not tried without limits",
    }
    isolated = False  # no limits, so the kit tries no attack

    def __init__(self, config: Config) -> None:
        self.config = config
        self._open: dict[str, ShellSandbox] = {}

    async def start(self, spec: SandboxSpec) -> ShellSandbox:
        """Start one; see :class:`rlcore.protocols.SandboxBackend` for what may be raised."""
        if spec.image or spec.build_context:
            raise ConfigError("there are no images here")
        name = secrets.token_hex(8)
        namespace = Namespace(Path(self.config.folder, name), closed=lambda: self._open.pop(name, None))
        sandbox = ShellSandbox(
            namespace,
            sandbox_id=name,
            workdir=spec.workdir or "/workspace",
            env=spec.env,
            user=spec.user,
        )
        try:
            await namespace.start(dict(spec.labels))
            await sandbox.prepare()
        except SandboxLost as error:
            await namespace.close()
            raise InfraError(f"the namespace did not come up: {error}") from None
        except BaseException:  # a cancel too leaves nothing behind
            await asyncio.shield(namespace.close())
            raise
        self._open[name] = sandbox
        return sandbox

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Live ones, whichever process started them."""
        found = []
        for record in Path(self.config.folder).glob("*"):  # noqa: ASYNC240 - a handful of small local files
            told = Namespace(record).read()
            if told is not None and told["labels"].items() >= dict(labels).items():
                found.append(SandboxInfo(record.name, told["labels"], told["created"]))
        return found

    async def delete(self, sandbox_id: str) -> None:
        """End one; unknown ids are fine."""
        await Namespace(Path(self.config.folder, Path(sandbox_id).name)).close()

    async def aclose(self) -> None:
        """End those that were started here."""
        await close_all(list(self._open.values()))


class Namespace:
    """What a shell sandbox needs: a script that runs, files that move (see :class:`rlcore.shell_sandbox.Carrier`)."""

    def __init__(self, record: Path, closed: Callable[[], object] = lambda: None) -> None:
        self.record = record
        self._closed = closed  # a run closes thousands: nothing is kept of them

    async def start(self, labels: dict[str, str]) -> None:
        """Start process 1 and write down what another process must know."""
        read, write = os.pipe()
        try:
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *BWRAP.split(),
                    *("--info-fd", str(write), "sh", "-c", "while sleep 1000; do :; done"),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(write,),
                    env=ENVIRONMENT,
                    start_new_session=True,
                )
            )
            try:
                await finished(starting)  # a cancel half-way would end bwrap alone, and not what it has begun
            finally:
                told = {"outer": starting.result().pid, "labels": labels, "created": time.time()}
                self.record.parent.mkdir(parents=True, exist_ok=True)
                self.record.write_text(json.dumps(told))
            os.close(write)
            write = -1
            with os.fdopen(os.dup(read)) as info:
                told["pid"] = json.loads(await asyncio.to_thread(info.read))["child-pid"]
            self.record.write_text(json.dumps(told))
        except (OSError, ValueError) as error:
            raise InfraError(f"bubblewrap did not start: {error}") from None
        finally:
            os.close(read)
            if write >= 0:
                os.close(write)
        for _ in range(100):  # the namespace is there before its file system is; then process 1 becomes `sh`
            if (await self._enter("read -r name < /proc/1/comm && test $name = sh"))[1] == 0:
                return
            await asyncio.sleep(0.02)
        raise InfraError("the namespace did not come up")

    def read(self) -> dict[str, Any] | None:
        """The record of a live one."""
        try:
            told = json.loads(self.record.read_text())
            state = Path(f"/proc/{told['pid']}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, ValueError, KeyError):
            return None
        return None if state in "ZX" else told

    async def call(self, script: str, *, seconds: float) -> str:
        """Run a script; a lost answer may be asked for again."""
        try:
            async with asyncio.timeout(seconds):
                return (await self._enter(f"exec 2>/dev/null\n{script}"))[0].decode("ascii", "replace")
        except TimeoutError:
            raise InfraError(f"no answer within {seconds:.0f} s") from None

    async def put(self, path: str, data: IO[bytes]) -> None:
        """Write a file."""
        data.seek(0)
        if (await self._enter(f"cat > {path}", data.read()))[1] != 0:
            raise InfraError(f"{path} was not written")

    async def get(self, path: str, out: IO[bytes], *, max_bytes: int) -> None:
        """Read a file."""
        content, _ = await self._enter(f"head -c {max_bytes + 1} {path}")
        if len(content) > max_bytes:
            raise ValueError(f"the file is larger than {max_bytes} bytes")
        out.write(content)

    async def alive(self) -> bool:
        """Whether process 1 lives."""
        return self.read() is not None

    async def close(self) -> None:
        """End process 1, and with it everything."""
        self._closed()
        try:
            told = json.loads(self.record.read_text())
        except (OSError, ValueError):
            return
        # the group: until it is set up, process 1 does not end with bwrap
        with contextlib.suppress(ProcessLookupError):
            os.killpg(told["outer"], signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(told["pid"], signal.SIGKILL)
        for _ in range(500):
            if self.read() is None:
                break
            await asyncio.sleep(0.01)
        self.record.unlink(missing_ok=True)

    async def _enter(self, script: str, stdin: bytes = b"") -> tuple[bytes, int]:
        told = self.read()
        if told is None:
            raise SandboxLost(f"the sandbox {self.record.name} is gone")
        process = await asyncio.create_subprocess_exec(
            *(*NSENTER.split(), "--target", str(told["pid"]), "sh", "-c", script),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
        )
        try:
            out, _ = await process.communicate(stdin)
        except BaseException:
            if process.returncode is None:
                process.kill()
            raise
        if self.read() is None:
            raise SandboxLost(f"the sandbox {self.record.name} is gone")
        return out, process.returncode or 0
