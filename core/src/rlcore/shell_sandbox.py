"""A whole sandbox from three calls: for backends whose provider can run a shell script and move a file.

A provider's own exec is rarely enough: it merges outputs, holds them whole, waits for background children, has time-outs of
its own or none, and loses the answer with the connection. So a command is started detached, under a small supervisor in
POSIX ``sh``, and asked about until it has ended; each of these calls may be lost and repeated without harm:

* the supervisor makes a folder of the command's id; where that is there already, nothing is started a second time;
* two readers keep head and tail of each output in files of bounded size, and go on reading for background children;
* a watchdog, forked before the command, ends everything that carries the command's id in its environment, by builtins
  alone, so that it works where a fork bomb has taken every process;
* the exit status is a line in a file; an empty or half-written one is none.

Needs in the sandbox: ``sh``, ``setsid``, ``mkfifo``, ``dd``, ``base64`` and what else busybox or coreutils have; ``/proc``.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import posixpath
import secrets
import shlex
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from rlcore.errors import ConfigError, InfraError, SandboxLost, Throttled
from rlcore.sandbox_tools import checked_timeout, clipped_text, finished, no_nul, pack_folder, shares, unpack_folder
from rlcore.types import ExecResult

__all__ = ["Carrier", "Creates", "ShellSandbox", "kill_marked"]

SCRATCH = "/var/tmp/.rlcore"
FIRST_WAIT = 8.0
"""Seconds that one call may wait for a command to end: well below any transport's own limit."""
ANSWER_SECONDS = 30.0
"""Seconds that a call may take beyond what it waits for."""
RETRIES = 3
LONGEST_SCRIPT = 16_000
"""Longer commands go through a file."""


class Carrier(Protocol):
    """What a provider must be able to do. Scripts are plain ``sh`` text without NUL; paths are absolute.

    Every method raises ``SandboxLost`` if the sandbox is gone, and ``InfraError`` for a failure after which the same call
    may be made again.
    """

    async def call(self, script: str, *, seconds: float) -> str:
        """Run a script as the sandbox's user and return its stdout, which is ASCII. It ends within ``seconds``."""
        ...

    async def put(self, path: str, data: IO[bytes]) -> None:
        """Write a file from ``data``, read from its beginning."""
        ...

    async def get(self, path: str, out: IO[bytes], *, max_bytes: int) -> None:
        """Read a file into ``out``; ``ValueError`` if it is larger than ``max_bytes``."""
        ...

    async def alive(self) -> bool:
        """Whether the provider says that the sandbox runs."""
        ...

    async def close(self) -> None:
        """Delete the sandbox; one that is gone is fine."""
        ...


class Creates:
    """Creates of a provider whose answers can be lost: what nobody waits for any more is found by its mark and deleted.

    Args:
        find: ids of the sandboxes with this mark.
        delete: deletes one; unknown ids are fine.
    """

    MARK = "rlcore.create"
    """Label that carries the mark of one create."""
    LOOKS = (0.0, 1.0, 3.0)
    """Seconds between looks: a sandbox may come up after the connection is gone."""

    def __init__(
        self, find: Callable[[str], Awaitable[Sequence[str]]], delete: Callable[[str], Awaitable[None]]
    ) -> None:
        self._find = find
        self._delete = delete
        self._tasks: set[asyncio.Task[None]] = set()

    async def one(self, create: Callable[[str], Coroutine[Any, Any, ShellSandbox]]) -> ShellSandbox:
        """Run ``create(mark)``. Cancelled, the provider is left to finish and what it made is deleted."""
        mark = secrets.token_hex(8)
        task = asyncio.create_task(create(mark))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._later(self._reap(mark, task))
            raise
        except Throttled:
            raise
        except (InfraError, ConfigError):
            self._later(self._reap(mark, None))
            raise

    async def settled(self, seconds: float) -> None:
        """Wait until nothing is looked for any more."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)

    async def _reap(self, mark: str, task: asyncio.Task[ShellSandbox] | None) -> None:
        if task is not None:
            try:
                await (await task).close()
                return
            except (InfraError, ConfigError):
                pass
        for seconds in self.LOOKS:
            await asyncio.sleep(seconds)
            try:
                for sandbox_id in await self._find(mark):
                    await self._delete(sandbox_id)
            except (InfraError, ConfigError):
                continue

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ShellSandbox:
    """The contract of :class:`rlcore.protocols.Sandbox` over a :class:`Carrier`."""

    def __init__(
        self,
        carrier: Carrier,
        *,
        sandbox_id: str,
        workdir: str = "/workspace",
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        max_download: int = 1024 * 1024 * 1024,
    ) -> None:
        self.id = sandbox_id
        self._carrier = carrier
        self._workdir = workdir
        self._env = dict(env or {})
        self._spec_user = user
        self._max_download = max_download
        self._uid, self._name, self._shell = 0, "root", "sh"
        self._setpriv = False
        self._answered: deque[str] = deque(maxlen=8)
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ShellSandbox:
        """The sandbox itself."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close it."""
        await self.close()

    async def prepare(self) -> ShellSandbox:
        """Make the usual folders and learn what the sandbox has; the last part of a start.

        Raises ``ConfigError`` for an image that lacks what the supervisor needs, or a user that cannot be.
        """
        folders = " ".join(map(shlex.quote, (self._workdir, "/tests", "/logs", "/solution")))
        told = await self._told(
            f"mkdir -p {SCRATCH} && chmod 700 {SCRATCH}; mkdir -p {folders} 2>/dev/null || sudo -n mkdir -p {folders}; "
            f"[ -w {shlex.quote(self._workdir)} ] || sudo -n chown $(id -u) {folders}; "
            "id -u; id -un 2>/dev/null || id -u; for x in setsid mkfifo dd base64 tail tar setpriv bash; do "
            "command -v $x >/dev/null && echo has:$x; done; [ -r /proc/self/environ ] && echo has:proc",
        )
        words = told.split()
        has = {word[4:] for word in words if word.startswith("has:")}
        if missing := {"setsid", "mkfifo", "dd", "base64", "tail", "tar", "proc"} - has:
            raise ConfigError(
                f"the sandbox's image lacks {', '.join(sorted(missing))}: install busybox or coreutils in it"
            )
        self._uid, self._name = int(words[0]), words[1]
        self._shell = "bash" if "bash" in has else "sh"
        self._setpriv = "setpriv" in has
        self._as_user(self._spec_user)
        return self

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        max_output: int = 64 * 1024,
    ) -> ExecResult:
        """Run a command; ``ConfigError`` for a user that this sandbox cannot be."""
        timeout = checked_timeout(timeout)
        head, tail = shares(max_output)
        argv = [self._shell, "-c", command] if isinstance(command, str) else list(command)
        if not argv:
            raise ValueError("the command is empty")
        variables = {**self._env, **(env or {})}
        no_nul(*argv, cwd or "", *(f"{name}={value}" for name, value in variables.items()))
        argv = [*self._as_user(self._spec_user if user is None else user), *argv]
        self._check_open()
        ident = secrets.token_hex(8)
        if isinstance(command, str) and len(command.encode("utf-8", "surrogateescape")) > LONGEST_SCRIPT:
            path = f"{SCRATCH}/{ident}.sh"
            await self._again(lambda: self._carrier.put(path, io.BytesIO(command.encode("utf-8", "surrogateescape"))))
            argv[-2:] = [path]
        cwd = posixpath.join(self._workdir, cwd or "")
        launch = _clear(self._answered) + _launch(
            ident, argv, cwd=cwd, env=variables, timeout=timeout, limit=max_output
        )
        ask = _ask(ident, head=head, tail=tail, limit=max_output)
        begun = time.monotonic()
        try:
            answer = await self._answer(launch, ask, timeout)
        except asyncio.CancelledError:
            with suppress(InfraError):
                await finished(asyncio.ensure_future(self._told(_kill(ident))))
            raise
        if answer is None:  # the watchdog was killed, or the machine was too busy: end it from outside
            await self._told(_kill(ident))
            answer = await self._answer("", ask, 2.0) or {"rc": "-1 1", "o": "0", "e": "0"}
        # not in the call that brings the answer: that one may have to be repeated
        self._answered.append(ident)
        return _result(answer, max_output, time.monotonic() - begun)

    async def read_file(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        """The content of a regular file."""
        no_nul(path)
        self._check_open()
        path = posixpath.join(self._workdir, path)
        made = f"{SCRATCH}/{secrets.token_hex(8)}.get"  # carriers see plain names only
        await self._checked(
            f'p={shlex.quote(path)}; [ -e "$p" ] || exit 41; [ -d "$p" ] && exit 42; [ -f "$p" ] && [ -r "$p" ] || exit 43; '
            f'[ $(wc -c <"$p") -le {max_bytes} ] || exit 46; cat <"$p" >{made} || exit 45',
            path,
        )
        out = io.BytesIO()
        await self._fetch(made, out, max_bytes)
        return out.getvalue()

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write all of it or nothing."""
        no_nul(path)
        self._check_open()
        path = posixpath.join(self._workdir, path)
        made = f"{SCRATCH}/{secrets.token_hex(8)}.put"
        await self._again(lambda: self._carrier.put(made, io.BytesIO(data)))
        await self._checked(
            f'p={shlex.quote(path)}; m={made}; t="$p.$$"; '
            '[ -d "$p" ] && { rm -f $m; exit 42; }; [ -e "$p" ] && ! [ -f "$p" ] && { rm -f $m; exit 43; }; '
            f'mkdir -p {shlex.quote(posixpath.dirname(path))} || exit 43; [ -L "$p" ] && p=$(readlink -f "$p"); '
            f'[ -e $m ] || [ -e "$p" ] || exit 45; [ -e $m ] || exit 0; cp $m "$t" && chmod {mode:o} "$t" && '
            'mv -f "$t" "$p" && rm -f $m || { rm -f "$t" $m; exit 45; }',
            path,
        )

    async def upload_dir(self, source: Path, target: str) -> None:
        """Copy a folder's content in; a link that stands in the way inside is replaced, never followed."""
        no_nul(target)
        self._check_open()
        target = posixpath.join(self._workdir, target)
        made = f"{SCRATCH}/{secrets.token_hex(8)}.tar"
        with tempfile.SpooledTemporaryFile(max_size=8 * 1024 * 1024) as archive:
            await asyncio.to_thread(pack_folder, Path(source), archive)
            await self._again(lambda: self._carrier.put(made, archive))
        folders = await asyncio.to_thread(_folders, Path(source))
        planted = "".join(f'd={shlex.quote(one)}; [ -L "$t/$d" ] && rm -f -- "$t/$d"; ' for one in folders)
        await self._checked(
            f't={shlex.quote(target)}; [ -L "$t" ] && rm -f -- "$t"; mkdir -p -- "$t" || exit 43; {planted}'
            f'tar -x -o -f {made} -C "$t" && rm -f {made} || exit 45',
            target,
            seconds=300.0,
        )

    async def download_dir(self, source: str, target: Path) -> None:
        """Copy files and folders out; links stay inside."""
        no_nul(source)
        self._check_open()
        source = posixpath.join(self._workdir, source)
        made = f"{SCRATCH}/{secrets.token_hex(8)}.tar"
        await self._checked(
            f's={shlex.quote(source)}; [ -e "$s" ] || exit 41; [ -d "$s" ] || exit 44; tar -c -f {made} -C "$s" . || exit 45; '
            f"[ $(wc -c <{made}) -le {self._max_download} ] || {{ rm -f {made}; exit 46; }}",
            source,
            seconds=300.0,
        )
        with tempfile.SpooledTemporaryFile(max_size=8 * 1024 * 1024) as archive:
            await self._fetch(made, archive, self._max_download)
            archive.seek(0)
            await asyncio.to_thread(unpack_folder, archive, Path(target), max_bytes=self._max_download)

    async def alive(self) -> bool:
        """Whether the provider says that it runs."""
        if self._closing is not None:
            return False
        try:
            return await self._carrier.alive()
        except InfraError:
            return False

    async def close(self) -> None:
        """Delete the sandbox; goes on to the end even if the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._carrier.close())
        await asyncio.shield(self._closing)

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _answer(self, launch: str, ask: str, timeout: float) -> dict[str, str] | None:
        """Start and ask until there is an answer; ``None`` if there is none some time after the time-out."""
        deadline = time.monotonic() + timeout + 3.0
        script = launch
        while True:
            wait = max(0.5, min(FIRST_WAIT, deadline - time.monotonic()))
            text = await self._told(f"{script}\nw={max(1, int(wait * 20))}\n{ask}", seconds=wait)
            if (answer := _parsed(text)) is not None:
                return answer
            script = ""
            if time.monotonic() >= deadline:
                return None

    async def _fetch(self, made: str, out: IO[bytes], max_bytes: int) -> None:
        """Get a file that was made for this, and remove it."""

        async def get() -> None:
            out.seek(0)
            out.truncate()
            await self._carrier.get(made, out, max_bytes=max_bytes)

        try:
            await self._again(get)
        finally:
            await self._told(f"rm -f {made}")

    async def _checked(self, script: str, path: str, *, seconds: float = 60.0) -> None:
        """Run a script in a subshell and raise the error that its exit code stands for."""
        code = (
            (await self._told(f"( {script} ) >/dev/null 2>&1; echo code:$?", seconds=seconds))
            .rpartition("code:")[2]
            .strip()
        )
        errors = {
            41: FileNotFoundError,
            42: IsADirectoryError,
            43: PermissionError,
            44: NotADirectoryError,
            45: OSError,
        }
        texts = {
            41: "is not there",
            42: "is a folder",
            43: "may not be used",
            44: "is not a folder",
            45: "was not written",
        }
        number = int(code) if code.isdigit() else 0
        if number == 46:
            raise ValueError(f"{path} is larger than allowed")
        if number in errors:
            raise errors[number](number if number == 45 else 0, texts[number], path)

    async def _told(self, script: str, *, seconds: float = 10.0) -> str:
        text: str = await self._again(lambda: self._carrier.call(script, seconds=seconds + ANSWER_SECONDS))
        return text

    async def _again(self, work: Any) -> Any:
        """Repeat a call whose answer was lost; a sandbox that is gone is lost."""
        for attempt in range(RETRIES + 1):
            try:
                return await work()
            except SandboxLost:
                raise
            except InfraError as error:
                if attempt == RETRIES or not await self._carrier.alive():
                    raise SandboxLost(f"the sandbox {self.id} does not answer: {error}") from None
                await asyncio.sleep(0.2 * 2**attempt)
        raise AssertionError("unreachable")

    def _as_user(self, user: str | int | None) -> list[str]:
        if user is None or str(user) in (str(self._uid), self._name):
            return []
        if self._uid == 0 and self._setpriv and str(user).isdigit():
            return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
        raise ConfigError(
            f"the sandbox runs commands as {self._name} ({self._uid}): another user, {user!r}, needs a sandbox of root, "
            "setpriv (util-linux) in the image and a numeric id"
        )

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxLost(f"the sandbox {self.id} is closed")


def kill_marked(ident: str) -> str:
    """One line of ``sh`` that ends every process which carries the id, by builtins alone; ``$n`` is 0 if none is left.

    All are stopped first, until no new one turns up, then all are killed. A signal to a group reaches each of its processes
    at once and stops those that are being forked, so one is enough for a fork bomb; one by one, a bomb is faster than any
    loop. A group whose leader does not carry the id is that of whatever runs the command: it is spared.
    """
    marked = f"*RLCORE_EXEC={ident}*"
    found = (
        f"for p in /proc/[0-9]*; do {{ IFS= read -r v <$p/environ; }} 2>/dev/null; case $v in {marked}) l=; v=; "
        "{ read -r l <$p/stat; set -- ${l##*) }; IFS= read -r v </proc/$3/environ; } 2>/dev/null; t=${p#/proc/}; "
        f"case $3 in ''|0|1) ;; *) case $v in ''|{marked}) t=-$3;; esac;; esac; %s;; esac; v=; done"
    )
    stop = found % 'case $s in *" $t "*) ;; *) kill -STOP $t 2>/dev/null; s="$s$t "; n=1;; esac'
    kill = found % "kill -KILL $t 2>/dev/null; n=1"
    rounds = "i=0; n=1; while [ $n = 1 ] && [ $i -lt 50 ]; do n=0; i=$((i+1)); %s; done"
    return f"s=' '; {rounds % stop}; u=$n; {rounds % kill}"


def _kill(ident: str) -> str:
    """End a command with all that it started; where new processes outrun that, everything in the sandbox."""
    return f"{kill_marked(ident)}; [ $u = 0 ] || kill -KILL -1"


_CLIP = (
    "clip() { f=$1.h; n=0; g=0; while LC_ALL=C dd bs=65536 count=1 >>$f 2>$1.s; do "
    "k=; { read y; read x; read k x; } <$1.s; case $y in 0+0*) break;; 1+0*) k=65536;; esac; "
    '[ -n "$k" ] || k=$(($(wc -c <$f)-g)); n=$((n+k)); g=$((g+k)); echo $n >$1.n; '  # busybox counts no bytes
    "if [ $g -ge $2 ]; then if [ $f = $1.h ]; then f=$1.1; else mv $1.1 $1.0; fi; g=0; : >$1.1; fi; done; "
    "echo $n >$1.n; : >$1.end; }"
)
"""Reads stdin to its end: the first ``$2`` bytes or so to ``$1.h``, the last ones to ``$1.0`` and ``$1.1``."""


def _launch(ident: str, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], timeout: float, limit: int) -> str:
    words = " ".join(map(shlex.quote, argv))
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in env.items())
    folder = f"{SCRATCH}/{ident}"
    supervisor = (
        f"d={folder}; echo $$ >$d/pid; {_CLIP}\n"
        f"mkfifo $d/o $d/e; clip $d/o {max(limit, 1)} <$d/o & a=$!; clip $d/e {max(limit, 1)} <$d/e & b=$!\n"
        # once it has begun to kill, it goes on to the end: what it stopped and did not kill would stay for ever
        f"( trap 'kill $z; exit' TERM; sleep {timeout:.3f} & z=$!; wait $z; trap '' TERM; : >$d/late; {_kill(ident)} ) & w=$!\n"
        f"( cd {shlex.quote(cwd)} || exit 126; {exports}export RLCORE_EXEC={ident}; exec setsid {words} ) >$d/o 2>$d/e & c=$!\n"
        "wait $c; r=$?; kill $w 2>/dev/null; wait $w; i=0\n"
        "while [ $i -lt 10 ] && ! { [ -e $d/o.end ] && [ -e $d/e.end ]; }; do sleep 0.05 || break; i=$((i+1)); done\n"
        "l=0; [ -e $d/late ] && l=1; echo $r $l >$d/rc\n"
    )
    return (
        f"mkdir -p {SCRATCH}; d={folder}; if mkdir $d 2>/dev/null; then\n"
        f"setsid sh -c {shlex.quote(supervisor)} </dev/null >/dev/null 2>&1 &\nfi"
    )


def _ask(ident: str, *, head: int, tail: int, limit: int) -> str:
    """Wait ``$w`` twentieths of a second for the end, then print what there is, once, in lines of ``name:value``."""
    part = (
        'n=0; read n <$d/%(x)s.n; echo %(x)s:$n; if [ ${n:-0} -le %(limit)d ]; then echo %(x)sh:$(base64 <$d/%(x)s.h | tr -d "\\n"); '
        'else echo %(x)sh:$(head -c %(head)d $d/%(x)s.h | base64 | tr -d "\\n"); '
        'echo %(x)st:$(cat $d/%(x)s.h $d/%(x)s.0 $d/%(x)s.1 2>/dev/null | tail -c %(tail)d | base64 | tr -d "\\n"); fi; '
    )
    parts = "".join(part % {"x": x, "head": head, "tail": tail, "limit": limit} for x in "oe")
    return (
        f"d={SCRATCH}/{ident}; i=0; while ! [ -s $d/rc ] && [ $i -lt $w ]; do "
        # a supervisor that was killed ("kill -9 -1") writes no end: say it for it
        "if [ -s $d/pid ] && read q <$d/pid && ! [ -d /proc/$q ]; then "
        "l=0; [ -e $d/late ] && l=1; [ -s $d/rc ] || echo 137 $l >$d/rc; fi; "
        "if [ $i -lt 20 ]; then sleep 0.02; i=$((i+1)); else sleep 0.2; i=$((i+4)); fi; done\n"
        f"if [ -s $d/rc ]; then read r <$d/rc; echo rc:$r; {parts}echo done:; else echo running:; fi 2>/dev/null"
    )


def _clear(idents: Iterable[str]) -> str:
    """Remove what is left of commands whose answer is here and whose outputs nobody holds any more."""
    return "".join(f"c={SCRATCH}/{ident}; [ -e $c/o.end ] && [ -e $c/e.end ] && rm -rf $c $c.sh; " for ident in idents)


def _parsed(text: str) -> dict[str, str] | None:
    """The answer, or ``None``: it still runs, or what came is not whole."""
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    words = lines.get("rc", "").split()
    if "done" not in lines or len(words) != 2 or not words[0].lstrip("-").isdigit():
        return None
    return lines


def _result(answer: Mapping[str, str], limit: int, seconds: float) -> ExecResult:
    code, late = answer["rc"].split()
    streams, cut = [], False
    for name in "oe":
        total = int(answer.get(name) or 0)
        try:
            head, tail = (base64.b64decode(answer.get(f"{name}{part}") or "") for part in "ht")
        except binascii.Error as error:
            raise SandboxLost(f"the sandbox's answer is no answer: {error}") from None
        if total <= limit:
            total = len(head)
        cut = cut or total > limit
        streams.append(clipped_text(head, tail, total))
    timed_out = late == "1"
    return ExecResult(
        exit_code=-1 if timed_out else int(code),
        stdout=streams[0],
        stderr=streams[1],
        truncated=cut,
        timed_out=timed_out,
        seconds=seconds,
    )


def _folders(source: Path) -> list[str]:
    return [str(one.relative_to(source)) for one in sorted(source.rglob("*")) if one.is_dir() and not one.is_symlink()]
