"""A sandbox is a process in namespaces of its own, with a folder of busybox as its root; commands enter by ``nsenter``."""

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import ConfigError, InfraError, SandboxLost
from rlcore.sandbox_tools import close_all, finished
from rlcore.shell_sandbox import ShellSandbox
from rlcore.types import SandboxInfo


class JailBackend:
    """Jails below one folder."""

    class Config(BaseModel):
        """Options of ``sandbox.name = "jail"``."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        folder: str = Field("/tmp/rlcore-jail", description="folder of the jails")
        busybox: str = Field("/bin/busybox", description="a static busybox")

    lacks = {
        "users": "busybox has no setpriv",
        "memory_limit": "there are no control groups",
        "process_limit": "there are no control groups",
        "disk_limit": "the root is a folder of the host",
    }
    isolated = False  # so the kit tries no attack that these limits would have to stop

    def __init__(self, config):
        self.config = config
        self.home = Path(config.folder)
        self.open = {}

    async def start(self, spec):
        """Unpack busybox, start process 1, make it a sandbox."""
        if spec.image or spec.build_context:
            raise ConfigError("the jail has no images")
        if not Path(self.config.busybox).exists():
            raise ConfigError(f"{self.config.busybox} is not there: apt-get install busybox-static")
        jail = Jail(self, self.home / f"jail-{secrets.token_hex(6)}")
        try:
            await jail.start(dict(spec.labels))
            box = ShellSandbox(
                jail, sandbox_id=jail.root.name, workdir=spec.workdir or "/workspace", env=spec.env, user=spec.user
            )
            await box.prepare()
        except SandboxLost as error:
            await jail.close()
            raise InfraError(f"the jail did not start: {error}") from None
        except BaseException:
            await asyncio.shield(jail.close())
            raise
        self.open[jail.root.name] = box
        return box

    async def list(self, labels):
        """Jails whose process 1 lives."""
        found = []
        for path in self.home.glob("jail-*/.jail"):
            told = json.loads(path.read_text())
            if alive(told["pid"]) and told["labels"].items() >= dict(labels).items():
                found.append(SandboxInfo(path.parent.name, told["labels"], told["created"]))
        return found

    async def delete(self, sandbox_id):
        """End a jail by its name."""
        await Jail(self, self.home / Path(sandbox_id).name).close()

    async def aclose(self):
        """Close what this backend started."""
        await close_all(list(self.open.values()))


class Jail:
    """The calls of a shell sandbox."""

    def __init__(self, backend, root):
        self.backend, self.root = backend, root

    async def start(self, labels):
        """Make the root and process 1."""
        for folder in ("bin", "proc", "tmp", "var/tmp", "dev", "etc", "root"):
            (self.root / folder).mkdir(parents=True)
        shutil.copy2(self.backend.config.busybox, self.root / "bin/busybox")
        (self.root / "tmp").chmod(0o1777)
        for name in ("null", "zero", "urandom"):
            (self.root / "dev" / name).touch()
        subprocess.run([self.root / "bin/busybox", "--install", "-s", self.root / "bin"], check=True)
        for link in (self.root / "bin").iterdir():
            if link.is_symlink():
                link.unlink()
                link.symlink_to("busybox")
        binds = "".join(f"mount --bind /dev/{n} {self.root}/dev/{n}; " for n in ("null", "zero", "urandom"))
        inside = f"{binds} ip link set lo up; exec chroot {self.root} /bin/sh -c 'while sleep 1000; do :; done'"
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *(
                    "unshare",
                    "--user",
                    "--map-root-user",
                    "--pid",
                    "--fork",
                    "--kill-child",
                    "--mount",
                    "--net",
                    "--uts",
                ),
                *(f"--mount-proc={self.root}/proc", "sh", "-c", inside),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                start_new_session=True,
            )
        )
        try:
            await finished(starting)  # a cancel half-way would end unshare alone, and not what it has begun
        finally:
            told = {"pid": starting.result().pid, "labels": labels, "created": time.time()}
            (self.root / ".jail").write_text(json.dumps(told))
        for _ in range(200):
            if self.init() is not None and (await self.enter("echo up"))[0] == b"up\n":
                return
            await asyncio.sleep(0.02)
        raise InfraError("the jail did not come up")

    def pid(self):
        """The outer process."""
        try:
            pid = json.loads((self.root / ".jail").read_text())["pid"]
        except (OSError, ValueError):
            return None
        return pid if alive(pid) else None

    def init(self):
        """Process 1 inside, as the host numbers it."""
        pid = self.pid()
        if pid is None:
            return None
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    async def enter(self, script, stdin=b""):
        """Run a script inside; its output and exit code."""
        init = self.init()
        if init is None:
            raise SandboxLost(f"{self.root.name} is gone")
        process = await asyncio.create_subprocess_exec(
            *("nsenter", "-t", str(init), "--user", "--preserve-credentials", "--pid", "--mount", "--net", "--uts"),
            *("chroot", str(self.root), "/bin/sh", "-c", script),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"},
            cwd="/",
        )
        try:
            out, _ = await process.communicate(stdin)
        except BaseException:
            if process.returncode is None:
                process.kill()
            raise
        if self.init() != init:
            raise SandboxLost(f"{self.root.name} is gone")
        return out, process.returncode

    async def call(self, script, *, seconds):
        """Run a script; a lost answer may be asked for again."""
        try:
            async with asyncio.timeout(seconds):
                return (await self.enter(f"exec 2>/dev/null; {script}"))[0].decode("ascii", "replace")
        except TimeoutError:
            raise InfraError(f"no answer within {seconds} s") from None

    async def put(self, path, data):
        """Write a file."""
        data.seek(0)
        _, code = await self.enter(f"cat > {path}", data.read())
        if code != 0:
            raise InfraError(f"{path} was not written")

    async def get(self, path, out, *, max_bytes):
        """Read a file."""
        content, _ = await self.enter(
            f"head -c {max_bytes + 1} '{path.replace(chr(39), chr(39) + chr(92) + chr(39) * 2)}'"
        )
        if len(content) > max_bytes:
            raise ValueError(f"{path} is larger than {max_bytes} bytes")
        out.write(content)

    async def alive(self):
        """Whether process 1 lives."""
        return self.init() is not None

    async def close(self):
        """End process 1, and with it everything; remove the root."""
        self.backend.open.pop(self.root.name, None)
        pid = self.pid()
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)
            while alive(pid):
                await asyncio.sleep(0.01)
        for _ in range(100):
            shutil.rmtree(self.root, ignore_errors=True)
            if not self.root.exists():
                return
            await asyncio.sleep(0.05)


def alive(pid):
    """Whether a process runs and is not only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
