"""Conformance of a sandbox backend: what every run relies on, as small experiments on real sandboxes.

A plugin's tests subclass :class:`SandboxConformance`; ``rlcore check sandbox NAME`` runs the same experiments on an
installed plugin. What a backend cannot do it declares as ``lacks`` (behaviour → reason), on the backend or on the test
class: a declared gap is tried too, and a gap that is none is reported. Commands are POSIX ``sh`` with what busybox has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError, InfraError, SandboxLost
from rlcore.protocols import Sandbox, SandboxBackend
from rlcore.sandbox_tools import ownership
from rlcore.types import ExecResult, SandboxSpec

__all__ = ["BEHAVIOURS", "Behaviour", "Bench", "Outcome", "SandboxConformance", "run_kit"]

SECONDS = 60.0
"""No behaviour may take longer; a backend that hangs fails, it does not hang the kit."""
PROMPT = 2.5
"""Seconds in which something that must not wait has to be over, start of a remote command included."""


class Bench:
    """What an experiment works with: a backend, a folder, sandboxes that are swept afterwards."""

    def __init__(self, backend: SandboxBackend, spec: SandboxSpec, folder: Path) -> None:
        self.backend = backend
        self.folder = folder
        self.run = f"check-{secrets.token_hex(6)}"
        self.labels = ownership(self.run)
        self.spec = replace(spec, labels={**spec.labels, **self.labels})
        self.box: Sandbox = None  # type: ignore[assignment]  # set before an experiment that shares one

    async def start(self, **changes: Any) -> Sandbox:
        """A sandbox of its own."""
        return await self.backend.start(replace(self.spec, **changes))

    async def sh(self, script: str, *, timeout: float = 20, **options: Any) -> ExecResult:
        """Run a script in the shared sandbox."""
        return await self.box.exec(script, timeout=timeout, **options)

    async def out(self, script: str, **options: Any) -> str:
        """The output of a script that must succeed."""
        result = await self.sh(script, **options)
        assert result.exit_code == 0, f"{script!r} gave {result}"
        return result.stdout

    async def ids(self) -> set[str]:
        """The live sandboxes of this bench."""
        return {info.id for info in await self.backend.list(self.labels)}

    async def sweep(self) -> int:
        """Delete what is left of this bench; how many there were."""
        left = await self.ids()
        for sandbox_id in left:
            await self.backend.delete(sandbox_id)
        return len(left)


@dataclass(frozen=True)
class Behaviour:
    """One experiment.

    Attributes:
        name: as in ``lacks``.
        text: what it shows.
        check: raises ``AssertionError`` if the behaviour is not there.
        shares: whether it may use a sandbox that other experiments used before it.
        optional: whether a backend may declare it as lacking.
        attack: whether it would harm this machine where the backend isolates nothing (``backend.isolated`` is false).
    """

    name: str
    text: str
    check: Callable[[Bench], Awaitable[None]]
    shares: bool
    optional: bool
    attack: bool


BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(
    *, own: bool = False, optional: bool = False, attack: bool = False
) -> Callable[..., Callable[[Bench], Awaitable[None]]]:
    """Add the experiment to the kit under the function's name."""

    def add(check: Callable[[Bench], Awaitable[None]]) -> Callable[[Bench], Awaitable[None]]:
        text = (check.__doc__ or "").strip().rstrip(".")
        BEHAVIOURS[check.__name__] = Behaviour(check.__name__, text, check, not own, optional, attack)
        return check

    return add


@dataclass(frozen=True)
class Outcome:
    """What came of one experiment.

    Attributes:
        name: of the behaviour.
        status: ``pass``, ``fail``, ``gap`` (declared, and real) or ``no gap`` (declared, but it passes).
        detail: why it failed, or the declared reason.
        seconds: wall clock.
    """

    name: str
    status: str
    detail: str
    seconds: float


class SandboxConformance:
    """Subclass it in the tests of a backend, and say how the backend is made.

    ``spec`` names an image where the backend needs one; ``lacks`` adds to what the backend declares itself.
    """

    spec = SandboxSpec()
    lacks: Mapping[str, str] = {}

    def make_backend(self) -> SandboxBackend:
        """A new backend; every test gets its own and closes it."""
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each behaviour."""
        if "behaviour" in metafunc.fixturenames:
            metafunc.parametrize("behaviour", list(BEHAVIOURS))

    def test_behaviour(self, behaviour: str) -> None:
        """The behaviour is there, or is a declared gap that is one."""
        outcome = asyncio.run(self._one(behaviour))
        assert outcome.status in ("pass", "gap"), f"{outcome.name}: {outcome.status}: {outcome.detail}"

    async def _one(self, name: str) -> Outcome:
        return (await run_kit(self.make_backend(), self.spec, lacks=self.lacks, only=[name]))[0]


async def run_kit(
    backend: SandboxBackend,
    spec: SandboxSpec,
    *,
    lacks: Mapping[str, str] | None = None,
    only: Sequence[str] | None = None,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run the experiments one after the other, sweep their sandboxes, close the backend.

    Experiments that may share a sandbox do, and get a new one after a failure. ``report`` is called after each.
    """
    declared = {**getattr(backend, "lacks", {}), **(lacks or {})}
    if unknown := sorted(set(declared) - set(BEHAVIOURS)):
        raise ConfigError(f"lacks names no behaviour of the kit: {', '.join(unknown)}")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="rlcore-check-") as folder:
        bench = Bench(backend, spec, Path(folder))
        try:
            for name in only or BEHAVIOURS:
                outcome = await _try(BEHAVIOURS[name], bench, declared)
                outcomes.append(outcome)
                report(outcome)
        finally:
            try:
                if bench.box is not None:
                    await bench.box.close()
                await bench.sweep()
            except (ConfigError, InfraError):
                if any(outcome.status == "pass" for outcome in outcomes):
                    raise  # something may be left; where nothing ever started, the outcomes say why
            finally:
                await backend.aclose()
    return outcomes


async def _try(one: Behaviour, bench: Bench, declared: Mapping[str, str]) -> Outcome:
    begun = time.monotonic()
    failure = ""
    try:
        async with asyncio.timeout(SECONDS):
            assert getattr(bench.backend, "isolated", True) or not one.attack, (
                "not tried: nothing protects this machine"
            )
            if one.shares and bench.box is None:
                bench.box = await bench.start()
            await one.check(bench)
    except TimeoutError:
        failure = f"not over after {SECONDS:g} s"
    except AssertionError as error:
        failure = str(error).splitlines()[0] if str(error) else traceback.format_exc().strip().splitlines()[-2].strip()
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is the outcome of the experiment
        failure = f"{type(error).__name__}: {error}"
    if failure:
        with contextlib.suppress(InfraError, ConfigError):
            if one.shares and bench.box is not None:
                await bench.box.close()
                bench.box = None  # type: ignore[assignment]
            for sandbox_id in await bench.ids() - ({bench.box.id} if bench.box else set()):
                await bench.backend.delete(sandbox_id)
    seconds = time.monotonic() - begun
    if one.name in declared and one.optional:
        status, detail = ("gap" if failure else "no gap"), declared[one.name]
    elif one.name in declared:
        status, detail = "fail", f"required, so it cannot be declared as lacking ({declared[one.name]})"
    else:
        status, detail = ("fail", failure) if failure else ("pass", "")
    return Outcome(one.name, status, detail, seconds)


def _equal(found: object, wanted: object) -> None:
    assert found == wanted, f"got {found!r}, wanted {wanted!r}"


@asynccontextmanager
async def _raises(*kinds: type[BaseException]) -> AsyncIterator[None]:
    try:
        yield
    except kinds:
        return
    raise AssertionError(f"{' or '.join(kind.__name__ for kind in kinds)} was not raised")


async def _beats(bench: Bench, name: str) -> bool:
    """Whether a heartbeat (a background loop that appends to a file) still runs."""
    first = await bench.out(f"wc -c < /tmp/{name}")
    for _ in range(4):  # a busy machine may stop it for a while
        await asyncio.sleep(0.3)
        if first != await bench.out(f"wc -c < /tmp/{name}"):
            return True
    return False


def _heart(name: str) -> str:
    return f"while true; do echo . >> /tmp/{name}; sleep 0.05; done"


# --- how a command ends -----------------------------------------------------------------------------------------------


@behaviour()
async def exit_codes(bench: Bench) -> None:
    """The exit code is the command's own."""
    for code in (0, 1, 7, 255):
        _equal((await bench.sh(f"exit {code}")).exit_code, code)


@behaviour()
async def own_124_and_137(bench: Bench) -> None:
    """A command's own exit code 124 or 137 is no time-out."""
    for code in (124, 137, 143):
        result = await bench.sh(f"exit {code}")
        _equal((result.exit_code, result.timed_out), (code, False))


@behaviour()
async def death_by_signal(bench: Bench) -> None:
    """Death by signal n is reported as 128 + n."""
    _equal((await bench.sh("kill -TERM $$")).exit_code, 143)
    _equal((await bench.sh("kill -KILL $$")).exit_code, 137)


@behaviour()
async def missing_command(bench: Bench) -> None:
    """A command that does not exist fails with 127, by text and by list, and the sandbox lives on."""
    _equal((await bench.sh("no-such-command-here")).exit_code, 127)
    result = await bench.box.exec(["no-such-command-here"], timeout=20)
    assert result.exit_code in (126, 127), f"got {result}"
    assert await bench.box.alive()


@behaviour()
async def seconds_are_measured(bench: Bench) -> None:
    """The result says how long the command took."""
    result = await bench.sh("sleep 0.5")
    assert 0.4 < result.seconds < 20, f"got {result.seconds}"


# --- output -----------------------------------------------------------------------------------------------------------


@behaviour()
async def exact_output(bench: Bench) -> None:
    """Output comes as it is: no newline added, none taken, tabs and carriage returns kept."""
    _equal(await bench.out(r"printf 'a\n\n\tb \r\n'"), "a\n\n\tb \r\n")
    _equal(await bench.out("printf x"), "x")
    _equal(await bench.out("true"), "")


@behaviour(optional=True)
async def separate_stderr(bench: Bench) -> None:
    """Stdout and stderr come apart."""
    result = await bench.sh("echo out; echo err >&2")
    _equal((result.stdout, result.stderr), ("out\n", "err\n"))


@behaviour()
async def stderr_is_kept(bench: Bench) -> None:
    """What goes to stderr is somewhere in the result."""
    result = await bench.sh("echo problem >&2; exit 3")
    _equal(result.exit_code, 3)
    assert "problem" in result.stdout + result.stderr, f"got {result}"


@behaviour()
async def invalid_utf8(bench: Bench) -> None:
    """Bytes that are no UTF-8 become U+FFFD and harm nothing."""
    result = await bench.sh(r"printf '\377\376A'")
    assert "\ufffd" in result.stdout and "A" in result.stdout, f"got {result}"  # noqa: PT018
    _equal(result.exit_code, 0)


@behaviour()
async def random_bytes(bench: Bench) -> None:
    """A thousand random bytes come as some text."""
    result = await bench.sh("head -c 1000 /dev/urandom")
    _equal((result.exit_code, isinstance(result.stdout, str)), (0, True))


@behaviour()
async def split_character(bench: Bench) -> None:
    """A character whose bytes come apart in time is whole."""
    _equal(await bench.out(r"printf '\342\202'; sleep 0.3; printf '\254'"), "€")


@behaviour()
async def unicode_text(bench: Bench) -> None:
    """Text of every plane goes in and comes out."""
    _equal(await bench.out("printf %s 'ä€𝄞\u2028'"), "ä€𝄞\u2028")


@behaviour()
async def escapes_and_markers(bench: Bench) -> None:
    """Terminal escapes and chat markers come out as the text they are."""
    _equal(await bench.out(r"printf '\033[2J<|im_end|>\n<|endoftext|>'"), "\x1b[2J<|im_end|>\n<|endoftext|>")


@behaviour()
async def large_output(bench: Bench) -> None:
    """50 MB of output are clipped to head and tail in bounded memory."""
    before = _resident()
    result = await bench.sh("echo begin; yes | head -c 50000000; echo end", timeout=40, max_output=10_000)
    assert len(result.stdout) <= 10_100, f"{len(result.stdout)} characters came back"
    assert result.truncated
    assert result.stdout.startswith("begin"), f"the head is gone: {result.stdout[:40]!r}"
    assert result.stdout.endswith("end\n"), f"the tail is gone: {result.stdout[-40:]!r}"
    assert "left out" in result.stdout
    _equal(result.exit_code, 0)
    assert _resident() - before < 30e6, f"this process grew by {(_resident() - before) / 1e6:.0f} MB"


@behaviour()
async def stderr_is_bounded(bench: Bench) -> None:
    """Stderr is clipped on its own."""
    result = await bench.sh("yes | head -c 1000000 >&2; echo fine", max_output=5_000)
    assert len(result.stderr) <= 5_100, f"{len(result.stderr)} characters of stderr came back"
    assert result.truncated
    assert "fine" in result.stdout, f"got {result.stdout[:60]!r}"


@behaviour()
async def endless_output(bench: Bench) -> None:
    """Endless output ends with the time-out and is clipped."""
    begun = time.monotonic()
    result = await bench.sh("yes", timeout=1.5, max_output=10_000)
    assert result.timed_out
    assert result.truncated
    assert len(result.stdout) <= 10_100
    assert time.monotonic() - begun < 1.5 + 2 * PROMPT


@behaviour()
async def tiny_bound(bench: Bench) -> None:
    """A small bound is kept, and what fits is not marked."""
    result = await bench.sh("printf 0123456789", max_output=10)
    _equal((result.stdout, result.truncated), ("0123456789", False))
    result = await bench.sh("seq 1 100000", max_output=200)
    assert result.truncated
    assert len(result.stdout) <= 300


# --- input ------------------------------------------------------------------------------------------------------------


@behaviour()
async def stdin_is_closed(bench: Bench) -> None:
    """Commands that read stdin get its end at once."""
    begun = time.monotonic()
    _equal((await bench.sh("cat", timeout=10)).timed_out, False)
    assert (await bench.sh("read line", timeout=10)).exit_code != 0
    assert time.monotonic() - begun < 2 * PROMPT


@behaviour()
async def no_terminal(bench: Bench) -> None:
    """There is no terminal to ask a person at."""
    begun = time.monotonic()
    result = await bench.sh("head -c 1 < /dev/tty", timeout=10)
    assert result.exit_code != 0
    assert not result.timed_out
    assert time.monotonic() - begun < PROMPT


@behaviour()
async def list_command_as_is(bench: Bench) -> None:
    """A list runs as it is: no shell sees it."""
    result = await bench.box.exec(["printf", "%s|", "a b", "$HOME", "*", "-n", "'\"", "x\ny"], timeout=20)
    _equal(result.stdout, "a b|$HOME|*|-n|'\"|x\ny|")


@behaviour()
async def text_command_is_a_script(bench: Bench) -> None:
    """Text runs as a shell script: several lines, quotes, substitutions, cd."""
    _equal(await bench.out('cd /\npwd && echo "a  b" \'$c\' "$(echo d)"'), "/\na  b $c d\n")


@behaviour()
async def long_command(bench: Bench) -> None:
    """A script of 200 KB runs."""
    _equal(await bench.out(f": '{'x' * 200_000}'\necho done"), "done\n")


@behaviour()
async def nul_is_refused(bench: Bench) -> None:
    """A NUL byte in a command is a ValueError before anything runs."""
    async with _raises(ValueError):
        await bench.sh("echo a\0b")


# --- where a command runs ---------------------------------------------------------------------------------------------


@behaviour()
async def cwd_is_explicit(bench: Bench) -> None:
    """The working directory is the one that is given, for this command only."""
    usual = await bench.out("pwd")
    _equal(await bench.out("pwd", cwd="/tmp"), "/tmp\n")
    await bench.out("cd /bin")
    _equal(await bench.out("pwd"), usual)


@behaviour()
async def missing_cwd(bench: Bench) -> None:
    """A working directory that is not there fails the command, not the sandbox."""
    result = await bench.sh("echo ran", cwd="/no/such/folder")
    assert result.exit_code != 0
    assert "ran" not in result.stdout
    _equal(await bench.out("echo on"), "on\n")


@behaviour()
async def env_is_explicit(bench: Bench) -> None:
    """Variables reach this command only, newlines and quotes in them unharmed."""
    value = "a 'b' \"c\" $d `e`\n\\f"
    _equal(await bench.out('printf %s "$ODD"', env={"ODD": value}), value)
    _equal(await bench.out('printf %s "${ODD-none}"'), "none")


@behaviour(own=True)
async def spec_env_and_workdir(bench: Bench) -> None:
    """The spec's environment and workdir are those of every command; the workdir is made."""
    box = await bench.start(env={"FROM_SPEC": "a b", "OTHER": "1"}, workdir="/srv/new folder")
    result = await box.exec('echo "$FROM_SPEC"; pwd; echo $OTHER', timeout=20, env={"OTHER": "2"})
    _equal(result.stdout, "a b\n/srv/new folder\n2\n")
    await box.close()


@behaviour()
async def host_environment_stays_out(bench: Bench) -> None:
    """Nothing of this process's environment is inside."""
    name, value = f"RLCORE_CHECK_{secrets.token_hex(4)}", secrets.token_hex(8)
    os.environ[name] = value
    try:
        box = await bench.start()
        text = (await box.exec("env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'", timeout=20)).stdout
        await box.close()
    finally:
        del os.environ[name]
    for secret in (value, os.environ.get("VIRTUAL_ENV") or value):
        assert secret not in text, f"{secret} is visible inside"


@behaviour(optional=True)
async def users(bench: Bench) -> None:
    """A command runs as the numeric user that is given."""
    for user in (0, 1234):
        _equal(await bench.out("id -u", user=user), f"{user}\n")


@behaviour()
async def shared_folders(bench: Bench) -> None:
    """The workdir, /tmp, /logs, /tests and home can be written."""
    for folder in (".", "/tmp", "/logs", "/tests", '"$HOME"'):
        await bench.out(f"mkdir -p {folder} && echo x > {folder}/probe && rm {folder}/probe")


# --- files ------------------------------------------------------------------------------------------------------------


@behaviour()
async def files_and_state_stay(bench: Bench) -> None:
    """Files stay between commands."""
    await bench.out("mkdir -p /tmp/stay && echo kept > /tmp/stay/file")
    _equal(await bench.out("cat /tmp/stay/file"), "kept\n")


@behaviour()
async def bytes_round_trip(bench: Bench) -> None:
    """Every byte value is written and read back; an empty file is empty."""
    data = bytes(range(256)) * 3
    await bench.box.write_file("/tmp/bytes", data)
    _equal(await bench.box.read_file("/tmp/bytes"), data)
    await bench.box.write_file("/tmp/empty", b"")
    _equal(await bench.box.read_file("/tmp/empty"), b"")


@behaviour()
async def large_file(bench: Bench) -> None:
    """A file of 5 MB goes in and comes out."""
    data = os.urandom(5_000_000)
    await bench.box.write_file("/tmp/large", data)
    assert await bench.box.read_file("/tmp/large") == data, "the content differs"


@behaviour()
async def odd_names(bench: Bench) -> None:
    """Names with spaces, quotes, dollars, dashes, newlines and non-ASCII letters are only names."""
    for name in ("a b'c$(touch x)", "-n", "new\nline", "ä€", '"q"', "*", "back\\slash"):
        path = f"/tmp/odd {len(name)}/{name}"
        await bench.box.write_file(path, name.encode())
        _equal(await bench.box.read_file(path), name.encode())
        _equal((await bench.box.exec(["cat", path], timeout=20)).stdout, name)
        _equal(await bench.out("pwd", cwd=f"/tmp/odd {len(name)}"), f"/tmp/odd {len(name)}\n")


@behaviour()
async def write_makes_folders_and_mode(bench: Bench) -> None:
    """Parent folders are made, the mode is set, an older content is replaced whole."""
    path = f"/tmp/{secrets.token_hex(4)}/deep/run.sh"
    await bench.box.write_file(path, b"#!/bin/sh\necho first and longer\n", mode=0o755)
    await bench.box.write_file(path, b"#!/bin/sh\necho ok\n", mode=0o755)
    _equal(await bench.out(path), "ok\n")


@behaviour()
async def read_errors(bench: Bench) -> None:
    """Reading what is missing, a folder, or too much raises the right error."""
    async with _raises(FileNotFoundError):
        await bench.box.read_file("/tmp/not there")
    async with _raises(IsADirectoryError):
        await bench.box.read_file("/tmp")
    await bench.box.write_file("/tmp/ten", b"0123456789")
    async with _raises(ValueError):
        await bench.box.read_file("/tmp/ten", max_bytes=9)
    _equal(await bench.box.read_file("/tmp/ten", max_bytes=10), b"0123456789")


@behaviour()
async def write_errors(bench: Bench) -> None:
    """Writing to a folder raises the right error."""
    await bench.out("mkdir -p /tmp/is-a-folder")
    async with _raises(IsADirectoryError):
        await bench.box.write_file("/tmp/is-a-folder", b"x")


@behaviour()
async def upload(bench: Bench) -> None:
    """A folder goes in with its modes, empty folders, hidden files and inner links, over what is there."""
    source = bench.folder / "upload"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / ".hidden").write_bytes(b"\0\xff")
    (source / "inner").symlink_to("sub/run.sh")
    (source / "-odd name\n").write_text("odd")
    target = f"/tmp/up {secrets.token_hex(4)}/x"
    await bench.box.write_file(f"{target}/sub/old", b"old")
    await bench.box.upload_dir(source, target)
    _equal(await bench.out("./sub/run.sh; ./inner; ls -A sub | sort", cwd=target), "ran\nran\nempty\nold\nrun.sh\n")
    _equal(await bench.box.read_file(f"{target}/.hidden"), b"\0\xff")
    _equal(await bench.box.read_file(f"{target}/-odd name\n"), b"odd")


@behaviour()
async def upload_refuses_links_outside(bench: Bench) -> None:
    """A link that leaves the uploaded folder is a ValueError: it would read the host's files."""
    for number, link in enumerate(("/etc/passwd", "../../../../etc/passwd", "..")):
        source = bench.folder / f"escape{number}"
        source.mkdir()
        (source / "link").symlink_to(link)
        async with _raises(ValueError):
            await bench.box.upload_dir(source, "/tmp/escape")


@behaviour()
async def upload_does_not_follow_planted_links(bench: Bench) -> None:
    """A link that the agent planted where files are uploaded does not lead them elsewhere."""
    source = bench.folder / "planted"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "file").write_text("ours")
    place = f"/tmp/planted-{secrets.token_hex(4)}"
    await bench.out(f"mkdir -p {place}/target {place}/elsewhere && ln -s {place}/elsewhere {place}/target/sub")
    await bench.box.upload_dir(source, f"{place}/target")
    _equal(await bench.out(f"ls {place}/elsewhere; cat {place}/target/sub/file"), "ours")


@behaviour()
async def download(bench: Bench) -> None:
    """A folder comes out: nested, empty and binary files, odd names."""
    await bench.out("mkdir -p /tmp/down/sub/empty && printf 'a\\000b' > /tmp/down/sub/file && : > '/tmp/down/-n \n'")
    target = bench.folder / "down"
    await bench.box.download_dir("/tmp/down", target)
    _equal((target / "sub" / "file").read_bytes(), b"a\0b")
    assert (target / "sub" / "empty").is_dir()
    _equal((target / "-n \n").read_bytes(), b"")
    async with _raises(FileNotFoundError, NotADirectoryError):
        await bench.box.download_dir("/tmp/not there", bench.folder / "nothing")


@behaviour()
async def download_stays_inside(bench: Bench) -> None:
    """Links in a downloaded folder lead nowhere on the host, whatever they point at."""
    outside = bench.folder / "outside"
    outside.mkdir()
    (outside / "file").write_text("untouched")
    await bench.out(
        "mkdir -p /tmp/trap/real && cd /tmp/trap && echo in > real/file && ln -s /etc/passwd passwd && "
        f"ln -s {outside} away && ln -s ../outside near && ln -s / root && ln -s real/file good"
    )
    target = bench.folder / "trap"
    target.mkdir()
    (target / "real").symlink_to(outside)
    await bench.box.download_dir("/tmp/trap", target)
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target.resolve()), f"{path} leads to {path.resolve()}"
    _equal((outside / "file").read_text(), "untouched")


# --- background processes and time-outs -------------------------------------------------------------------------------


@behaviour()
async def background_child_does_not_block(bench: Bench) -> None:
    """A command that leaves children behind returns when it ends, also if they hold its output."""
    begun = time.monotonic()
    _equal((await bench.sh("sleep 300 & echo hi", timeout=10)).stdout, "hi\n")
    _equal((await bench.sh("setsid sh -c 'sleep 300' >/dev/null 2>&1 & echo hi", timeout=10)).stdout, "hi\n")
    assert time.monotonic() - begun < 2 * PROMPT


@behaviour()
async def background_server_stays(bench: Bench) -> None:
    """What is started in the background works on between commands, and may write to its output."""
    name = f"beat-{secrets.token_hex(4)}"
    await bench.out(f"sh -c 'while true; do echo .; echo . >> /tmp/{name}; sleep 0.05; done' & sleep 0.3")
    assert await _beats(bench, name)


@behaviour()
async def timeout_is_kept(bench: Bench) -> None:
    """A time-out ends the command in time and says so; what was said before is kept."""
    for timeout in (0.4, 1.0):
        begun = time.monotonic()
        result = await bench.sh("echo before; sleep 60", timeout=timeout)
        _equal((result.timed_out, result.exit_code), (True, -1))
        assert "before" in result.stdout or timeout < 1, f"got {result}"
        assert time.monotonic() - begun < timeout + PROMPT


@behaviour()
async def timeout_kills_children(bench: Bench) -> None:
    """A time-out kills the children of the command too."""
    name = f"beat-{secrets.token_hex(4)}"
    result = await bench.sh(f"({_heart(name)}) & sh -c '{_heart(name)}' & sleep 60", timeout=0.8)
    assert result.timed_out
    assert not await _beats(bench, name), "a child works on"


@behaviour(optional=True)
async def timeout_kills_daemons(bench: Bench) -> None:
    """A time-out also kills children that made a session of their own."""
    name = f"beat-{secrets.token_hex(4)}"
    result = await bench.sh(
        f"setsid sh -c '{_heart(name)}' & (setsid sh -c '{_heart(name)}' &) ; sleep 60", timeout=0.8
    )
    assert result.timed_out
    assert not await _beats(bench, name), "a daemon works on"


@behaviour()
async def timeout_spares_the_rest(bench: Bench) -> None:
    """The sandbox and what earlier commands left running live on after a time-out."""
    name = f"beat-{secrets.token_hex(4)}"
    await bench.out(f"({_heart(name)}) >/dev/null 2>&1 & sleep 0.2")
    assert (await bench.sh("sleep 60", timeout=0.5)).timed_out
    _equal(await bench.out("echo on"), "on\n")
    assert await _beats(bench, name), "the earlier background process is gone"


@behaviour()
async def timeout_when_signals_are_ignored(bench: Bench) -> None:
    """A command that ignores every signal it can is ended too."""
    begun = time.monotonic()
    result = await bench.sh("trap '' TERM INT HUP QUIT PIPE; while true; do sleep 0.1; done", timeout=0.8)
    assert result.timed_out
    assert time.monotonic() - begun < 0.8 + PROMPT


@behaviour()
async def senseless_timeouts(bench: Bench) -> None:
    """Zero, negative, infinite and NaN time-outs are a ValueError."""
    for timeout in (0, -1, float("inf"), float("nan")):
        async with _raises(ValueError):
            await bench.sh("true", timeout=timeout)


@behaviour()
async def cancelled_exec(bench: Bench) -> None:
    """Cancelling the caller ends the command; the sandbox lives on."""
    name = f"beat-{secrets.token_hex(4)}"
    task = asyncio.create_task(bench.sh(f"({_heart(name)}) & sleep 60", timeout=60))
    await asyncio.sleep(0.7)
    task.cancel()
    async with _raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.5)
    _equal(await bench.out("echo on"), "on\n")
    assert not await _beats(bench, name), "the cancelled command works on"


@behaviour()
async def commands_side_by_side(bench: Bench) -> None:
    """Commands in one sandbox run at the same time and do not mix."""
    begun = time.monotonic()
    results = await asyncio.gather(*(bench.sh(f"sleep 1; echo {number}") for number in range(4)))
    _equal([result.stdout for result in results], [f"{number}\n" for number in range(4)])
    assert time.monotonic() - begun < 1 + PROMPT


# --- limits and attacks -----------------------------------------------------------------------------------------------


@behaviour(own=True, optional=True)
async def network_is_off(bench: Bench) -> None:
    """Without ``network`` no address outside is reached; loopback works."""
    box = await bench.start()
    result = await box.exec("cat /proc/net/route /proc/net/dev", timeout=20)
    devices = [line.split(":")[0].strip() for line in result.stdout.splitlines() if ":" in line]
    routes = [line for line in result.stdout.splitlines() if "\t" in line and not line.startswith("Iface")]
    _equal((routes, set(devices) - {"lo", "sit0", "tunl0", "ip6tnl0"}), ([], set()))
    await box.close()


@behaviour(own=True, optional=True, attack=True)
async def memory_limit(bench: Bench) -> None:
    """A command that takes too much memory dies; the sandbox lives on."""
    box = await bench.start(memory_mb=64)
    result = await box.exec("head -c 400000000 /dev/zero | tail -n 1 | wc -c", timeout=30)
    assert "400000000" not in result.stdout, f"it got its memory: {result}"
    _equal((await box.exec("echo on", timeout=20)).stdout, "on\n")
    await box.close()


@behaviour(own=True, optional=True, attack=True)
async def process_limit(bench: Bench) -> None:
    """A fork bomb is bounded, ends with the time-out, and the sandbox lives on."""
    box = await bench.start()
    script = "renice -n 19 $$ >/dev/null 2>&1; bomb() { bomb | bomb & }; bomb; sleep 60"  # nice to the machine
    result = await box.exec(script, timeout=2, max_output=2000)
    assert result.timed_out or result.exit_code != 0, f"got {result}"
    _equal((await box.exec("echo on", timeout=20)).stdout, "on\n")
    await box.close()


@behaviour(own=True, optional=True, attack=True)
async def disk_limit(bench: Bench) -> None:
    """Filling the disk is refused at the limit; the sandbox lives on."""
    box = await bench.start(disk_mb=16)
    result = await box.exec(
        "i=0; while [ $i -lt 8 ]; do head -c 8000000 /dev/zero > fill$i || exit 9; i=$((i+1)); done", timeout=30
    )
    assert result.exit_code != 0, "64 MB fitted into 16"
    _equal((await box.exec("rm -f fill*; echo on", timeout=20)).stdout, "on\n")
    await box.close()


@behaviour(own=True, optional=True, attack=True)
async def killing_everything(bench: Bench) -> None:
    """A command that kills all it can, process 1 first, hangs nothing: the sandbox works on or is lost."""
    box = await bench.start()
    begun = time.monotonic()
    with contextlib.suppress(SandboxLost):
        await box.exec("kill -9 1; kill -9 -1; sleep 0.2; echo survived", timeout=5)
    with contextlib.suppress(SandboxLost):
        _equal((await box.exec("echo on", timeout=5)).stdout, "on\n")
    assert time.monotonic() - begun < 12
    await box.close()


# --- the life of a sandbox --------------------------------------------------------------------------------------------


@behaviour(own=True)
async def sandboxes_are_apart(bench: Bench) -> None:
    """Two sandboxes share no files."""
    one, two = await bench.start(), await bench.start()
    await one.write_file("/tmp/mine", b"x")
    async with _raises(FileNotFoundError):
        await two.read_file("/tmp/mine")
    assert one.id != two.id
    await one.close()
    await two.close()


@behaviour(own=True)
async def close_twice(bench: Bench) -> None:
    """A second close does nothing; closing at the same time does it once."""
    box = await bench.start()
    assert await box.alive()
    await asyncio.gather(box.close(), box.close())
    await box.close()
    assert not await box.alive()


@behaviour(own=True)
async def use_after_close(bench: Bench) -> None:
    """After close every method raises SandboxLost."""
    box = await bench.start()
    await box.close()
    for use in (
        lambda: box.exec("true", timeout=5),
        lambda: box.read_file("/tmp/x"),
        lambda: box.write_file("/tmp/x", b""),
        lambda: box.upload_dir(bench.folder, "/tmp/x"),
        lambda: box.download_dir("/tmp", bench.folder / "after"),
    ):
        async with _raises(SandboxLost):
            await use()


@behaviour(own=True)
async def list_by_label(bench: Bench) -> None:
    """Live sandboxes are found by all of their labels, closed ones are not."""
    mark = secrets.token_hex(4)
    box = await bench.start(labels={**bench.spec.labels, "mark": mark})
    found = await bench.backend.list({"mark": mark})
    _equal([info.id for info in found], [box.id])
    assert found[0].labels.items() >= {"mark": mark, **bench.labels}.items(), f"got {found[0].labels}"
    _equal(list(await bench.backend.list({"mark": mark, "run": "another"})), [])
    await box.close()
    _equal(list(await bench.backend.list({"mark": mark})), [])


@behaviour(own=True)
async def delete_by_id(bench: Bench) -> None:
    """Deleting by id ends a sandbox; unknown ids are fine."""
    box = await bench.start()
    await bench.backend.delete(box.id)
    assert box.id not in await bench.ids()
    await bench.backend.delete(box.id)
    await box.close()


@behaviour(own=True)
async def lost_is_not_failed(bench: Bench) -> None:
    """A command in a sandbox that goes away raises SandboxLost; it is no failed command."""
    box = await bench.start()
    running = asyncio.create_task(box.exec("sleep 60", timeout=90))
    await asyncio.sleep(0.7)
    await bench.backend.delete(box.id)
    async with _raises(SandboxLost):
        await running
    async with _raises(SandboxLost):
        await box.exec("true", timeout=5)
    assert not await box.alive()
    await box.close()


@behaviour(own=True)
async def sixteen_at_once(bench: Bench) -> None:
    """Sixteen sandboxes start, work and close at the same time."""

    async def one(number: int) -> str:
        box = await bench.start()
        try:
            return (await box.exec(f"echo {number} > /tmp/n; sleep 0.2; cat /tmp/n", timeout=40)).stdout
        finally:
            await box.close()

    _equal(await asyncio.gather(*map(one, range(16))), [f"{number}\n" for number in range(16)])
    _equal(await bench.ids() - ({bench.box.id} if bench.box else set()), set())


@behaviour(own=True)
async def cancelled_start(bench: Bench) -> None:
    """A start that is cancelled at any moment leaves nothing behind."""
    mark = secrets.token_hex(4)
    for step in range(6):
        task = asyncio.create_task(bench.start(labels={**bench.spec.labels, "mark": mark}))
        await asyncio.sleep(0.03 * step)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await task).close()
    for _ in range(50):
        if not (left := await bench.backend.list({"mark": mark})):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{len(left)} sandboxes are left")


@behaviour(own=True)
async def cancelled_close(bench: Bench) -> None:
    """A close whose caller is cancelled still closes."""
    box = await bench.start()
    task = asyncio.create_task(box.close())
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    for _ in range(100):
        if box.id not in await bench.ids():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the sandbox is still there")


@behaviour(own=True)
async def sweep(bench: Bench) -> None:
    """What a run left is found by its label and deleted; another run's sandbox is left alone."""
    foreign = await bench.start(labels={**bench.spec.labels, "run": bench.run + "-other"})
    boxes = [await bench.start() for _ in range(2)]
    shared = {bench.box.id} if bench.box else set()
    _equal(await bench.ids() - shared, {box.id for box in boxes})
    for box in boxes:
        await bench.backend.delete(box.id)
    _equal(await bench.ids() - shared, set())
    assert await foreign.alive()
    for box in [*boxes, foreign]:
        await box.close()


def _resident() -> float:
    """Bytes of memory of this process; 0 where that cannot be told."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0
