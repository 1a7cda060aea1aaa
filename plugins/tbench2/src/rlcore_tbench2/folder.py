"""One task folder: its files read and checked, so that nothing about it comes as a surprise in a run."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.errors import TaskError
from rlcore.types import Message

from rlcore_tbench2.schema import TaskFile, parse_task_toml

__all__ = ["TaskFolder", "content_hash", "read_folder"]

TB1_MESSAGE = (
    "{folder}: terminal-bench 1 task (task.yaml, no task.toml). Convert it first, e.g. with Harbor's terminal-bench "
    "mapper; this loader reads Harbor / terminal-bench-2 folders only."
)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_FETCHES = re.compile(
    r"^[^#\n]*\b(apt-get|apt|git\s+clone|pip3?\s+install|uvx|curl|wget)\b(?!.*(localhost|127\.0\.0\.1|--no-index))",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """A task folder that was read.

    Attributes:
        path: the folder.
        id: ``task.name``, else the path below the root of the set.
        file: its ``task.toml``.
        instruction: ``instruction.md`` without leading canary comments.
        examples: solved examples (``metadata.rlcore.examples``), shown before the instruction.
        max_commands: commands that the task needs (``metadata.rlcore.max_commands``).
        image_optional: any POSIX system with the files of ``environment/`` will do.
        end_processes: what the agent left running is ended before the tests.
        dockerfile: whether there is ``environment/Dockerfile``.
        warnings: what to know about it.
        unsupported: why it is not run here; it is a good task elsewhere.
    """

    path: Path
    id: str
    file: TaskFile
    instruction: str
    examples: tuple[Message, ...] = ()
    max_commands: int | None = None
    image_optional: bool = False
    end_processes: bool = False
    dockerfile: bool = False
    warnings: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()

    @property
    def environment(self) -> Path:
        """The folder of what the agent's part needs."""
        return self.path / "environment"

    @property
    def tests(self) -> Path:
        """The folder of the verifier."""
        return self.path / "tests"


def read_folder(path: Path, root: Path | None = None, *, strict: bool = False) -> TaskFolder:
    """Read and check one task folder.

    Args:
        path: the folder.
        root: the set that it belongs to: ids are paths below it; default: the folder's parent.
        strict: unknown keys are errors.

    Raises:
        TaskError: it cannot be a task; names the file and the key.
    """
    if not (path / "task.toml").is_file():
        if (path / "task.yaml").is_file():
            raise TaskError(TB1_MESSAGE.format(folder=path))
        raise TaskError(f"{path}: no task.toml; a task folder has task.toml, instruction.md, environment/ and tests/")
    file = parse_task_toml((path / "task.toml").read_bytes(), str(path / "task.toml"), strict=strict)
    reader = _Reader(path, file)
    instruction = reader.instruction()
    examples, max_commands, image_optional, end_processes = reader.own_metadata()
    reader.check_files()
    dockerfile = reader.check_image(image_optional)
    reader.check_tests()
    reader.check_support()
    relative = path.name if root is None or path == root else path.relative_to(root).as_posix()
    return TaskFolder(
        path=path,
        id=file.name or relative,
        file=file,
        instruction=instruction,
        examples=examples,
        max_commands=max_commands,
        image_optional=image_optional,
        end_processes=end_processes,
        dockerfile=dockerfile,
        warnings=(*file.warnings, *reader.warnings),
        unsupported=tuple(reader.unsupported),
    )


def content_hash(path: Path) -> str:
    """SHA-256 over the names, modes (executable or not) and bytes of everything in a task folder."""
    digest = hashlib.sha256()
    for one in sorted(path.rglob("*")):
        if one.is_file():
            name = one.relative_to(path).as_posix().encode()
            content = one.read_bytes()
            executable = b"x" if one.stat().st_mode & 0o100 else b"-"
            digest.update(b"%d %s %d %s\n" % (len(name), name, len(content), executable))
            digest.update(content)
    return digest.hexdigest()


@dataclass(slots=True)
class _Reader:
    path: Path
    file: TaskFile
    warnings: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)

    def refuse(self, where: str, message: str) -> TaskError:
        return TaskError(f"{self.path / where}: {message}")

    def instruction(self) -> str:
        path = self.path / "instruction.md"
        if not path.is_file():
            if self.file.steps:
                return ""
            raise TaskError(f"{self.path}: instruction.md is missing")
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.refuse("instruction.md", f"not UTF-8 (byte {error.start})") from error
        text = _without_canary(text.replace("\r\n", "\n"))
        if not text.strip():
            self.warnings.append("instruction.md is empty")
        return text

    def own_metadata(self) -> tuple[tuple[Message, ...], int | None, bool, bool]:
        own = self.file.metadata.get("rlcore", {})
        if not isinstance(own, dict):
            raise self.refuse("task.toml", "metadata.rlcore must be a table")
        own = dict(own)
        count = own.pop("max_commands", None)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise self.refuse(
                "task.toml", f"metadata.rlcore.max_commands must be a whole number above 0, got {count!r}"
            )
        switches = []
        for key in ("image_optional", "end_processes"):
            switch = own.pop(key, False)
            if not isinstance(switch, bool):
                raise self.refuse("task.toml", f"metadata.rlcore.{key} must be true or false, got {switch!r}")
            switches.append(switch)
        examples = self._examples(own.pop("examples", []))
        if own:
            known = "max_commands, image_optional, end_processes, examples"
            raise self.refuse("task.toml", f"unknown key metadata.rlcore.{next(iter(own))}; there are {known}")
        return examples, count, *switches  # type: ignore[return-value]

    def _examples(self, raw: Any) -> tuple[Message, ...]:
        where = "metadata.rlcore.examples"
        if not isinstance(raw, list):
            raise self.refuse("task.toml", f"{where} must be an array of tables with role and content")
        for number, one in enumerate(raw):
            role = "user" if number % 2 == 0 else "assistant"
            if not isinstance(one, dict) or set(one) != {"role", "content"} or not isinstance(one["content"], str):
                raise self.refuse("task.toml", f"{where}[{number}] must hold role and content and nothing else")
            if one["role"] != role:
                raise self.refuse("task.toml", f"{where}[{number}].role must be {role}: users and assistants alternate")
        if len(raw) % 2:
            raise self.refuse("task.toml", f"{where} must end with an assistant's message")
        return tuple(Message(one["role"], one["content"]) for one in raw)

    def check_files(self) -> None:
        """Links that leave the task or run in a circle, and files that are only pointers to large-file storage."""
        root = self.path.resolve()
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if path.is_symlink():
                try:
                    target = path.resolve(strict=True)
                except (OSError, RuntimeError) as error:
                    raise self.refuse(name, "link to nothing or in a circle") from error
                if not target.is_relative_to(root):
                    raise self.refuse(name, f"link leaves the task: {target}")
                if target.is_dir() and path.absolute().is_relative_to(target):
                    raise self.refuse(name, "link to a folder that it lies in")
            elif path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(LFS_POINTER):
                raise self.refuse(name, "only a Git LFS pointer; fetch the file with git lfs pull")
        if (self.path / "media.toml").is_file():
            self._check_media()

    def _check_media(self) -> None:
        """Media that is fetched apart: every file that ``media.toml`` names must be there."""
        import tomllib

        try:
            raw = tomllib.loads((self.path / "media.toml").read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise self.refuse("media.toml", f"not TOML: {error}") from error
        for name in _paths_of(raw):
            if not any((base / name).exists() for base in (self.path, self.path / "environment", self.path / "tests")):
                raise self.refuse("media.toml", f"the file {name} is missing; fetch the task's media first")

    def check_image(self, image_optional: bool) -> bool:
        file, environment = self.file, self.path / "environment"
        dockerfile = (environment / "Dockerfile").is_file()
        compose = [name for name in COMPOSE_FILES if (environment / name).exists()]
        if "docker-compose.yaml" in compose:
            self.unsupported.append(f"needs docker compose (environment/{compose[0]})")
        elif compose:
            self.warnings.append(f"environment/{compose[0]} is not read: Harbor reads docker-compose.yaml only")
        if file.docker_image is not None and dockerfile:
            self.warnings.append("both docker_image and Dockerfile; using the image")
        if file.docker_image is None and not dockerfile and not image_optional and not compose:
            raise TaskError(
                f"{self.path}: no image: neither environment.docker_image in task.toml nor environment/Dockerfile"
            )
        if file.docker_image is not None and file.docker_image.startswith(("localhost/", "localhost:")):
            self.unsupported.append(f"image {file.docker_image} is not pullable")
        if dockerfile:
            self._check_dockerfile(environment)
        return dockerfile

    def _check_dockerfile(self, environment: Path) -> None:
        """Literal sources of COPY and ADD must be in the build context."""
        try:
            text = (environment / "Dockerfile").read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.refuse("environment/Dockerfile", f"not UTF-8 (byte {error.start})") from error
        for words in _instructions(text):
            if words[0].upper() not in ("COPY", "ADD"):
                continue
            flags = [word for word in words[1:] if word.startswith("--")]
            sources = [word for word in words[1:] if not word.startswith("--")][:-1]
            if any(flag.startswith("--from") for flag in flags) or any("<<" in word for word in words):
                continue
            for source in sources:
                if re.search(r"[*?\[$]|^[a-z+]+://|^git@", source):
                    continue
                if not (environment / source.lstrip("/")).exists():
                    raise self.refuse("environment/Dockerfile", f"{words[0].upper()} of {source}, which is not there")

    def check_tests(self) -> None:
        if self.file.steps or self.file.separate_verifier:
            return
        script = self.path / "tests" / "test.sh"
        if not script.is_file():
            if self.file.os == "windows":
                return
            raise self.refuse("tests/test.sh", "missing")
        text = script.read_bytes().decode("utf-8", "replace")
        if "reward" not in text and not any(
            b"reward" in path.read_bytes()
            for path in sorted((self.path / "tests").rglob("*"))
            if path.is_file() and path.stat().st_size < 1 << 20
        ):
            raise self.refuse(
                "tests/test.sh",
                "no reward: nothing in tests/ names /logs/verifier/reward.txt or reward.json, so there would never be "
                "a verdict",
            )
        if "\r\n" in text:
            self.warnings.append("tests/test.sh has CRLF line ends; they are converted when it is uploaded")
        if _FETCHES.search(text):
            if (self.file.verifier.network_mode or self.file.network_mode) == "no-network":
                self.unsupported.append("the verifier needs the network (tests/test.sh), but has none")
            else:
                self.warnings.append("the verifier needs the network (tests/test.sh)")

    def check_support(self) -> None:
        file, say = self.file, self.unsupported.append
        if file.steps:
            say(f"task declares {len(file.steps)} [[steps]]; multi-step tasks are not supported")
            stated = file.metadata.get("number_of_milestones")
            if isinstance(stated, int) and stated and stated != len(file.steps):
                self.warnings.append(
                    f"metadata.number_of_milestones is {stated}, but there are {len(file.steps)} steps"
                )
        if file.os != "linux":
            say(f"needs {file.os} (environment.os)")
        if file.gpus:
            kinds = f" ({' or '.join(file.gpu_types)})" if file.gpu_types else ""
            say(f"needs {file.gpus} GPU{'s' if file.gpus > 1 else ''}{kinds}")
        if file.tpu:
            say("needs a TPU (environment.tpu)")
        if file.mcp_servers:
            say(f"needs MCP servers ({', '.join(file.mcp_servers)}); the terminal agent has none")
        if file.separate_verifier:
            say("needs a separate verifier environment (verifier.environment_mode)")
        if file.collects:
            say("needs [[verifier.collect]]; skipping it would grade stale state")
        modes = [file.agent.network_mode or file.network_mode, file.verifier.network_mode or file.network_mode]
        if "allowlist" in modes:
            say("needs a network allowlist; a sandbox's network is on or off")
        elif modes[0] != modes[1]:
            say(f"needs network {modes[0]} for the agent and {modes[1]} for the verifier; a sandbox has one for both")


def _without_canary(text: str) -> str:
    """The text without the comment lines at its top that name a canary."""
    lines = text.split("\n")
    start = 0
    while start < len(lines):
        line = lines[start].strip()
        comment = line.startswith(("#", "<!--", "//"))
        if line and not (comment and "canary" in line.lower()):
            break
        start += 1
    found = any("canary" in line.lower() for line in lines[:start])
    return "\n".join(lines[start:]) if found else text


def _instructions(dockerfile: str) -> list[list[str]]:
    """The instructions of a Dockerfile as words; what cannot be split is left to the build."""
    text = re.sub(
        r"\\[ \t]*\n", " ", "\n".join(line for line in dockerfile.splitlines() if not line.lstrip().startswith("#"))
    )
    found = []
    for line in text.splitlines():
        form = re.match(r"\s*(COPY|ADD)\s+((?:--\S+\s+)*)(\[.*\])\s*$", line, re.IGNORECASE)
        try:
            words = shlex.split(line) if form is None else [form[1], *form[2].split(), *json.loads(form[3])]
        except ValueError:
            continue
        if words and all(isinstance(word, str) for word in words):
            found.append(words)
    return found


def _paths_of(raw: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in raw.items():
        if key in ("path", "file", "filename") and isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            found += _paths_of(value)
        elif isinstance(value, list):
            found += [name for one in value if isinstance(one, dict) for name in _paths_of(one)]
    return found
