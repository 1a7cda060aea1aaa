"""``task.toml`` of Harbor's schema 1.x, as found in the wild: accepted, accepted with a warning, or refused by key.

No feature is switched on the version string: files that claim 1.0 use keys of 1.3. Unknown keys are warnings (errors in
strict mode), since every writer adds some; a wrong type or an impossible value is an error that names the key.
"""

from __future__ import annotations

import math
import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlcore.errors import TaskError

__all__ = ["Phase", "Step", "TaskFile", "parse_task_toml"]

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
TABLES = ("task", "metadata", "agent", "verifier", "solution", "environment")
NETWORK_MODES = ("public", "no-network", "allowlist")
NEAR_MISSES = {
    "memory_gb": "memory_mb",
    "disk_gb": "storage_mb",
    "disk_mb": "storage_mb",
    "disk": "storage_mb",
    "image": "docker_image",
    "cpu": "cpus",
    "cpu_count": "cpus",
    "cpu_cores": "cpus",
    "gpu": "gpus",
    "timeout": "timeout_sec",
    "timeout_s": "timeout_sec",
    "timeout_seconds": "timeout_sec",
    "working_dir": "workdir",
    "network": "network_mode",
}


@dataclass(frozen=True, slots=True)
class Phase:
    """What ``[agent]`` and ``[verifier]`` share. ``network_mode`` is ``None`` where the environment's holds."""

    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One of ``[[steps]]``; ``verifier`` does not fall back to the root's time-out."""

    name: str
    agent: Phase = Phase()
    verifier: Phase = Phase(timeout_sec=600.0)
    min_reward: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A ``task.toml`` that was accepted. Times in seconds, sizes in MiB, ``None``: not stated.

    Attributes:
        schema: ``schema_version`` or ``version`` as written.
        name: ``task.name``, usually ``org/name``.
        warnings: what a reader should know, each naming its key.
    """

    schema: str | None = None
    name: str | None = None
    authors: tuple[Mapping[str, str], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    agent: Phase = Phase()
    verifier: Phase = Phase(timeout_sec=600.0)
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    separate_verifier: bool = False
    collects: int = 0
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: tuple[str, ...] = ()
    tpu: bool = False
    mcp_servers: tuple[str, ...] = ()
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    network_mode: str = "public"
    allowed_hosts: tuple[str, ...] = ()
    healthcheck: Mapping[str, Any] | None = None
    steps: tuple[Step, ...] = ()
    multi_step_reward_strategy: str | None = None
    warnings: tuple[str, ...] = ()


def parse_task_toml(data: bytes | str, where: str, *, strict: bool = False) -> TaskFile:
    """Read the content of a ``task.toml``.

    Args:
        data: the file; UTF-8, a byte-order mark and CRLF line ends are fine.
        where: the file's path, for messages.
        strict: unknown keys in the known tables are errors.

    Raises:
        TaskError: with ``where``, the key and what to write instead.
    """
    if isinstance(data, bytes):
        try:
            data = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise TaskError(f"{where}: not UTF-8 (byte {error.start})") from error
    try:
        raw = tomllib.loads(data.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{where}: not TOML: {error}") from error
    try:
        return _Parser(strict).task_file(raw)
    except _Refused as error:
        raise TaskError(f"{where}: {error}") from None


class _Refused(Exception):
    pass


class _Table:
    """One table that is being read: what was not asked for at the end is unknown."""

    def __init__(self, raw: Mapping[str, Any], path: str, warnings: list[str]) -> None:
        self.raw, self.path, self.warnings = dict(raw), path, warnings

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def refuse(self, name: str, message: str) -> _Refused:
        return _Refused(f"{self.key(name)} {message}")

    def has(self, name: str) -> bool:
        return name in self.raw

    def take(self, name: str, convert: Callable[[_Table, str, Any], Any], default: Any = None) -> Any:
        return convert(self, name, self.raw.pop(name)) if name in self.raw else default

    def table(self, name: str) -> _Table:
        value = self.raw.pop(name, {})
        if not isinstance(value, dict):
            raise self.refuse(name, f"must be a table, got {_show(value)}")
        return _Table(value, self.key(name), self.warnings)

    def tables(self, name: str) -> Iterator[_Table]:
        value = self.raw.pop(name, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.refuse(name, f"must be an array of tables, got {_show(value)}")
        for number, one in enumerate(value):
            yield _Table(one, f"{self.key(name)}[{number}]", self.warnings)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, str):
        return f'the string "{value}"'
    if isinstance(value, (int, float)):
        return f"the number {value}"
    names: dict[type, str] = {dict: "a table", list: "a list"}
    return names.get(type(value), f"a {type(value).__name__}")


def _string(table: _Table, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise table.refuse(name, f"must be a string, got {_show(value)}")
    return value


def _strings(table: _Table, name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise table.refuse(name, f"must be a list of strings, got {_show(value)}")
    return tuple(value)


def _seconds(table: _Table, name: str, value: Any) -> float:
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
        else:
            table.warnings.append(f'{table.key(name)} is the string "{value}"; read as a number of seconds')
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise table.refuse(name, f"must be a number of seconds, got {_show(value)}")
    if not math.isfinite(number) or number <= 0:
        raise table.refuse(name, f"must be a finite number of seconds above 0, got {value}")
    return float(number)


def _whole(table: _Table, name: str, value: Any) -> int:
    number = value
    if isinstance(value, str) and re.fullmatch(r"\s*\d+\s*", value, re.ASCII):
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number) or number % 1:
        hint = f"; for sizes with a unit write {name.removesuffix('_mb')}" if name.endswith("_mb") else ""
        raise table.refuse(name, f"must be a whole number, got {_show(value)}{hint}")
    return int(number)


def _megabytes(table: _Table, name: str, value: Any) -> int:
    number = _whole(table, name, value)
    if number <= 0:
        raise table.refuse(name, f"must be above 0, got {number}")
    return number


def _count(table: _Table, name: str, value: Any) -> int:
    number = _whole(table, name, value)
    if number < 0:
        raise table.refuse(name, f"must not be negative, got {number}")
    return number


def _cpus(table: _Table, name: str, value: Any) -> float:
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise table.refuse(name, f"must be a number, got {_show(value)}")
    if not math.isfinite(number) or number <= 0:
        raise table.refuse(name, f"must be a finite number above 0, got {value}")
    return int(number) if number % 1 == 0 else float(number)


_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}


def _size(table: _Table, name: str, value: Any) -> int:
    """The deprecated strings of 1.0: a number and K, M or G, 1024-based, to MiB (rounded up)."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise table.refuse(name, f'must be a string such as "2G"; for a number of megabytes write {name}_mb = {value}')
    match = isinstance(value, str) and re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG])\s*", value, re.IGNORECASE | re.ASCII)
    if not match:
        raise table.refuse(name, f'must be a string such as "2G" (a number and K, M or G), got {_show(value)}')
    size = math.ceil(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise table.refuse(name, f"must be above 0, got {_show(value)}")
    return size


def _boolean(table: _Table, name: str, value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise table.refuse(name, f"must be true or false, got {_show(value)}")
    return value


def _user(table: _Table, name: str, value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise table.refuse(name, f"must be a user name or a numeric id, got {_show(value)}")
    return value


def _env(table: _Table, name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise table.refuse(name, f"must be a table of strings, got {_show(value)}")
    for key, one in value.items():
        if not isinstance(one, str):
            shown = str(one).lower() if isinstance(one, bool) else one
            hint = f'; write "{shown}"' if isinstance(one, (bool, int, float)) else f", got {_show(one)}"
            raise table.refuse(f"{name}.{key}", f"must be a string{hint}")
        if "\0" in one or "=" in key or not key:
            raise table.refuse(f"{name}.{key}", "cannot be an environment variable")
    return dict(value)


def _workdir(table: _Table, name: str, value: Any) -> str:
    path = _string(table, name, value)
    if not path.startswith("/") or ".." in path.split("/"):
        raise table.refuse(name, f"must be an absolute path without '..', got {_show(value)}")
    return path


def _mode(table: _Table, name: str, value: Any) -> str:
    if value not in NETWORK_MODES:
        raise table.refuse(name, f"must be one of {', '.join(NETWORK_MODES)}, got {_show(value)}")
    return str(value)


_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_ADDRESS = re.compile(r"[0-9a-f:.]+(/\d{1,3})?")


def _hosts(table: _Table, name: str, value: Any) -> tuple[str, ...]:
    hosts = tuple(host.lower().removesuffix(".") for host in _strings(table, name, value))
    for host in hosts:
        if not _HOST.fullmatch(host) and not _ADDRESS.fullmatch(host):
            raise table.refuse(name, f'must hold hosts, *.hosts, addresses or networks (no URL, no port), got "{host}"')
    return hosts


class _Parser:
    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.warnings: list[str] = []

    def task_file(self, raw: Mapping[str, Any]) -> TaskFile:
        root = _Table(raw, "", self.warnings)
        _refuse_other_tools(raw)
        schema = self._schema(root, empty=not raw)
        name, authors = self._task(root)
        metadata = root.table("metadata").raw
        if not authors and isinstance(metadata.get("author_name"), str):
            authors = ({"name": metadata["author_name"], "email": str(metadata.get("author_email", ""))},)
        agent = root.table("agent")
        verifier = root.table("verifier")
        solution = root.table("solution")
        environment = root.table("environment")

        separate = verifier.take("environment_mode", _string)
        own = verifier.raw.pop("environment", None)
        if separate not in (None, "shared", "separate"):
            raise verifier.refuse("environment_mode", f'must be shared or separate, got "{separate}"')
        if separate == "shared" and own is not None:
            raise verifier.refuse("environment_mode", "is shared, but there is [verifier.environment]; remove one")
        collects = sum(1 for _ in self._collects(verifier))
        verifier_env = verifier.take("env", _env, {})
        solution_env = solution.take("env", _env, {})
        parsed = TaskFile(
            schema=schema,
            name=name,
            authors=authors,
            metadata=metadata,
            agent=self._phase(agent, None),
            verifier=self._phase(verifier, 600.0),
            verifier_env=verifier_env,
            solution_env=solution_env,
            separate_verifier=separate == "separate" or own is not None,
            collects=collects,
            **self._environment(environment),
            **self._steps(root),
        )
        root.raw.pop("source", None)
        artifacts = root.raw.pop("artifacts", [])
        if not isinstance(artifacts, list) or not all(isinstance(one, (str, dict)) for one in artifacts):
            raise root.refuse("artifacts", f"must be a list of paths or tables, got {_show(artifacts)}")
        self._unknown(solution)
        for key in list(root.raw):
            what = "table" if isinstance(root.raw[key], dict) else "key"
            self._warn(f"unknown {what} {key}: not used")
        return _with_warnings(parsed, self.warnings)

    def _warn(self, message: str) -> None:
        if self.strict:
            raise _Refused(message)
        self.warnings.append(message)

    def _unknown(self, table: _Table) -> None:
        for key in table.raw:
            near = NEAR_MISSES.get(key)
            if near is not None and table.path.split(".")[-1].split("[")[0] in TABLES:
                self._warn(f"unknown key {table.key(key)}: value not used ({near}?)")
            elif key in TABLES or key in ("artifacts", "steps", "schema_version", "version", "source"):
                self._warn(f"unknown key {table.key(key)}: it stands below [{table.path}]; did it belong above?")
            else:
                value = table.raw[key]
                inside = f" (with {', '.join(value)}): not used" if isinstance(value, dict) and value else ""
                self._warn(f"unknown key {table.key(key)}{inside}")

    def _schema(self, root: _Table, *, empty: bool) -> str | None:
        for name in ("version", "schema_version"):
            if root.has(name) and not isinstance(root.raw[name], str):
                raise root.refuse(name, f'must be a string such as "1.1", got {_show(root.raw[name])}')
        old = root.raw.pop("version", None)
        schema: str | None = root.raw.pop("schema_version", old)
        if schema is None:
            if empty:
                self.warnings.append("no version key; treated as current")
        elif schema not in VERSIONS:
            self.warnings.append(
                f'version "{schema}" is not a Harbor schema version ({VERSIONS[0]}-{VERSIONS[-1]}); read as Harbor 1.x'
            )
        return schema

    def _task(self, root: _Table) -> tuple[str | None, tuple[Mapping[str, str], ...]]:
        table = root.table("task")
        name = table.take("name", _string)
        if name is not None:
            if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)?", name) or ".." in name:
                raise table.refuse("name", f'must be org/name of letters, digits, ".", "_" and "-", got "{name}"')
            if "/" not in name:
                self.warnings.append(f'task.name "{name}" has no "org/" part; Harbor itself refuses this file')
        elif table.raw:
            self.warnings.append("[task] has no name; the folder's name is the id (Harbor itself refuses this file)")
        table.take("version", _string)
        table.take("description", _string)
        table.take("keywords", _strings)
        table.raw.pop("id", None)
        authors = []
        for author in table.tables("authors"):
            if not isinstance(author.raw.get("name"), str):
                raise _Refused(f"{author.path}.name must be a string")
            authors.append({"name": author.raw["name"], "email": str(author.raw.get("email") or "")})
        self._unknown(table)
        return name, tuple(authors)

    def _phase(self, table: _Table, default_timeout: float | None) -> Phase:
        timeout = table.take("timeout_sec", _seconds, default_timeout)
        user = table.take("user", _user)
        mode, hosts = self._network(table, None)
        if table.has("allow_internet"):
            table.raw.pop("allow_internet")
            self.warnings.append(f"{table.path}.allow_internet is not a key; use {table.path}.network_mode")
        self._unknown(table)
        return Phase(timeout, user, mode, hosts)

    def _network(self, table: _Table, default: str | None) -> tuple[str | None, tuple[str, ...]]:
        mode = table.take("network_mode", _mode)
        has_hosts = table.has("allowed_hosts")
        hosts = table.take("allowed_hosts", _hosts, ())
        if has_hosts and hosts and mode != "allowlist":
            if mode is not None:
                raise table.refuse("allowed_hosts", f'needs network_mode = "allowlist", got "{mode}"')
            raise table.refuse("allowed_hosts", 'needs network_mode = "allowlist"')
        return mode or default, hosts

    def _collects(self, verifier: _Table) -> Iterator[None]:
        for hook in verifier.tables("collect"):
            if not isinstance(hook.raw.get("command"), str):
                raise _Refused(f"{hook.path}.command must be a string")
            yield

    def _environment(self, table: _Table) -> dict[str, Any]:
        stated_mode = table.has("network_mode") or bool(table.raw.get("allowed_hosts"))
        internet = table.take("allow_internet", _boolean)
        mode, hosts = self._network(table, None)
        if internet is not None:
            if stated_mode:
                self.warnings.append(
                    f'environment.allow_internet = {str(internet).lower()} ignored: network_mode = "{mode}" is set'
                )
            else:
                self.warnings.append("environment.allow_internet deprecated; use network_mode")
        if mode is None:
            mode = "no-network" if internet is False else "public"
        system = table.take("os", _string, "linux").lower()
        if system not in ("linux", "windows"):
            raise table.refuse("os", f'must be linux or windows, got "{system}"')
        known = {
            "build_timeout_sec": table.take("build_timeout_sec", _seconds, 600.0),
            "docker_image": table.take("docker_image", _string) or None,
            "os": system,
            "cpus": table.take("cpus", _cpus),
            "memory_mb": self._size_of(table, "memory"),
            "storage_mb": self._size_of(table, "storage"),
            "gpus": table.take("gpus", _count),
            "gpu_types": table.take("gpu_types", _strings, ()),
            "tpu": table.raw.pop("tpu", None) is not None,
            "mcp_servers": tuple(str(server.raw.get("name", "?")) for server in table.tables("mcp_servers")),
            "workdir": table.take("workdir", _workdir),
            "env": table.take("env", _env, {}),
            "network_mode": mode,
            "allowed_hosts": hosts,
            "healthcheck": self._healthcheck(table),
        }
        if table.take("skills_dir", _string):
            self.warnings.append("environment.skills_dir is not used: the terminal agent has no skills")
        self._unknown(table)
        return known

    def _size_of(self, table: _Table, name: str) -> int | None:
        shown = table.raw.get(name)
        old: int | None = table.take(name, _size)
        new: int | None = table.take(f"{name}_mb", _megabytes)
        if old is not None:
            if new is not None and new != old:
                raise _Refused(f'{table.path}: {name} "{shown}" ({old} MB) and {name}_mb {new} disagree; keep one')
            self.warnings.append(f"environment.{name} deprecated; use {name}_mb = {old}")
        return new if new is not None else old

    def _healthcheck(self, table: _Table) -> Mapping[str, Any] | None:
        if not table.has("healthcheck"):
            return None
        check = table.table("healthcheck")
        if not check.has("command"):
            raise _Refused(f"{check.path}.command is missing")

        def pause(inner: _Table, name: str, value: Any) -> float:
            return 0.0 if value == 0 and not isinstance(value, bool) else _seconds(inner, name, value)

        found = {
            "command": check.take("command", _string),
            "interval_sec": check.take("interval_sec", pause, 5.0),
            "timeout_sec": check.take("timeout_sec", _seconds, 30.0),
            "start_period_sec": check.take("start_period_sec", pause, 0.0),
            "start_interval_sec": check.take("start_interval_sec", pause, 5.0),
            "retries": check.take("retries", _count, 3),
        }
        self._unknown(check)
        return found

    def _steps(self, root: _Table) -> dict[str, Any]:
        strategy = root.take("multi_step_reward_strategy", _string)
        if strategy not in (None, "mean", "final"):
            raise root.refuse("multi_step_reward_strategy", f'must be mean or final, got "{strategy}"')
        steps = []
        seen: dict[str, str] = {}
        for table in root.tables("steps"):
            name = table.take("name", _string)
            if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
                raise _Refused(f"{table.path}.name must be usable as the name of one folder")
            key = unicodedata.normalize("NFC", unicodedata.normalize("NFKC", name).casefold())
            if key in seen:
                raise _Refused(f'steps: names must differ by more than letter case: "{seen[key]}", "{name}"')
            seen[key] = name
            agent, verifier = table.table("agent"), table.table("verifier")
            for inner in ("environment", "environment_mode", "env", "collect"):
                verifier.raw.pop(inner, None)
            for inner in ("healthcheck", "artifacts"):
                table.raw.pop(inner, None)
            step = Step(
                name=name,
                agent=self._phase(agent, None),
                verifier=self._phase(verifier, 600.0),
                min_reward=table.take("min_reward", _min_reward, {}),
            )
            self._unknown(table)
            steps.append(step)
        return {"steps": tuple(steps), "multi_step_reward_strategy": strategy}


def _min_reward(table: _Table, name: str, value: Any) -> dict[str, float]:
    gates = value if isinstance(value, dict) else {"reward": value}
    for key, number in gates.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise table.refuse(name, f"must be a number or a table of numbers, got {_show(number)} for {key}")
    return {key: float(number) for key, number in gates.items()}


def _refuse_other_tools(raw: Mapping[str, Any]) -> None:
    ours = ("agent", "verifier", "environment", "metadata")
    if any(name in raw for name in ours):
        return
    theirs = [key for key, value in raw.items() if isinstance(value, dict) and key not in ("task", "solution")]
    if theirs:
        shown = ", ".join(f"[{key}]" for key in theirs)
        raise _Refused(f"not a Harbor task.toml: has {shown} and none of {', '.join(f'[{one}]' for one in ours)}")


def _with_warnings(parsed: TaskFile, warnings: list[str]) -> TaskFile:
    return replace(parsed, warnings=tuple(warnings))
