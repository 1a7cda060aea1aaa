"""``rlcore sandboxes``: what runs have left on the backends, what a run's sandboxes cost, and the sweeper."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcore.cli.app import command_group
from rlcore.errors import ConfigError, RlcoreError
from rlcore.sandbox_tools import owner_is_gone

if TYPE_CHECKING:
    from rlcore.plugins import Plugins
    from rlcore.protocols import SandboxBackend
    from rlcore.types import SandboxInfo

__all__ = ["app"]

app = command_group("List and sweep sandboxes.")

ASK_SECONDS = 60.0
DELETES_IN_FLIGHT = 8

Backend = Annotated[
    list[str] | None, typer.Option("--backend", "-b", metavar="NAME", help="Backends to ask; default: all that answer.")
]
Run = Annotated[str | None, typer.Option("--run", metavar="ID", help="Only the sandboxes of this run.")]
OlderThan = Annotated[str | None, typer.Option(metavar="AGE", help="Only older ones: 90s, 30m, 2h, 1d.")]
Sets = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="An option of the backend.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@dataclass(frozen=True)
class Found:
    """A sandbox of ours.

    Attributes:
        gone: whether the process that started it has ended; ``None``: it ran on another machine.
    """

    backend: str
    info: SandboxInfo
    gone: bool | None

    def row(self) -> dict[str, Any]:
        """For printing."""
        owner = {True: "ended", False: "running", None: "on another machine"}[self.gone]
        age = None if self.info.created is None else round(time.time() - self.info.created, 1)
        labels = self.info.labels
        facts = {"run": labels.get("run"), "task": labels.get("task"), "age_seconds": age, "owner": owner}
        return {"backend": self.backend, "id": self.info.id, **facts}


@app.command("list")
def list_(
    context: typer.Context,
    backend: Backend = None,
    run: Run = None,
    older_than: OlderThan = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Live sandboxes that rlcore started, of any run, on any backend."""
    least = _seconds(older_than)

    async def work(name: str, one: SandboxBackend) -> list[dict[str, Any]]:
        return [found.row() for found in await _found(name, one, run, least)]

    rows, silent = asyncio.run(_each(context.obj.plugins, backend, sets or (), work))
    _print(rows, silent, as_json)


@app.command("sweep")
def sweep(
    context: typer.Context,
    backend: Backend = None,
    run: Run = None,
    older_than: OlderThan = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    sets: Sets = None,
    as_json: AsJson = False,
) -> int:
    """Delete the sandboxes that ended runs have left, and nothing that is not ours.

    A sandbox whose run is still going on this machine is never deleted; one of another machine only with --run or
    --older-than. Exits with 1 if something could not be deleted.
    """
    least = _seconds(older_than)
    named = run is not None or older_than is not None

    async def work(name: str, one: SandboxBackend) -> list[dict[str, Any]]:
        found = await _found(name, one, run, least)
        doomed = {each.info.id for each in found if each.gone or (each.gone is None and named)}
        if not dry_run:
            await _delete(one, doomed)
            left = {each.info.id for each in await _found(name, one, run, least)}
        fates = {True: "would be deleted"} if dry_run else {True: "deleted", False: "still there"}
        rows = []
        for each in found:
            fate = fates[dry_run or each.info.id not in left] if each.info.id in doomed else "kept"
            rows.append({**each.row(), "fate": fate})
        return rows

    rows, silent = asyncio.run(_each(context.obj.plugins, backend, sets or (), work))
    _print(rows, silent, as_json)
    return 1 if any(row["fate"] == "still there" for row in rows) else 0


@app.command("report")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    cost_per_hour: Annotated[float | None, typer.Option(help="Price of one sandbox for an hour.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a run's sandboxes did, from its ledger: how many, how long they lived, what was refused."""
    from rlcore.rollout.lease import lifetimes

    path = run / "sandboxes.jsonl"
    if not path.exists():
        raise ConfigError(f"{path} is not there: name a run directory of a run with sandboxes")
    table = lifetimes(path)
    if cost_per_hour is not None:
        table["cost"] = round(table["seconds"] / 3600 * cost_per_hour, 4)
    if as_json:
        print(json.dumps(table, indent=2))
    else:
        for key, value in table.items():
            print(f"{key.replace('_', ' '):24} {value if not isinstance(value, float) else format(value, '.1f')}")


async def _each(
    plugins: Plugins,
    names: Sequence[str] | None,
    settings: Sequence[str],
    work: Callable[[str, SandboxBackend], Awaitable[list[dict[str, Any]]]],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Do ``work`` on each backend; which ones gave no answer, and why. A backend that was named must answer."""
    from rlcore.cli._backends import build_backend

    if settings and not names:
        raise ConfigError("--set needs the backend that it is for: add --backend NAME")
    rows: list[dict[str, Any]] = []
    silent: dict[str, str] = {}
    for name in names or plugins.names("sandbox"):
        try:
            async with asyncio.timeout(ASK_SECONDS):
                backend = build_backend(plugins, name, settings)
                try:
                    rows += await work(name, backend)
                finally:
                    await backend.aclose()
        except (RlcoreError, TimeoutError, ImportError) as error:
            if names:
                raise
            silent[name] = str(error) or f"no answer within {ASK_SECONDS:g} s"
    return rows, silent


async def _found(name: str, backend: SandboxBackend, run: str | None, least: float) -> list[Found]:
    labels = {"launcher": "rlcore"} | ({"run": run} if run is not None else {})
    newest = time.time() - least
    return [
        Found(name, info, owner_is_gone(info.labels))
        for info in await backend.list(labels)
        if not least or (info.created is not None and info.created <= newest)
    ]


async def _delete(backend: SandboxBackend, ids: Iterable[str]) -> None:
    slots = asyncio.Semaphore(DELETES_IN_FLIGHT)

    async def one(sandbox_id: str) -> None:
        async with slots:
            await backend.delete(sandbox_id)

    await asyncio.gather(*map(one, ids))


def _seconds(age: str | None) -> float:
    if age is None:
        return 0.0
    read = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", age.strip())
    if read is None:
        raise ConfigError(f"--older-than {age}: write a number and s, m, h or d, for example 2h")
    return float(read[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[read[2]]


def _print(rows: list[dict[str, Any]], silent: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"sandboxes": rows, "no_answer": silent}, indent=2))
        return
    for row in rows:
        age = "" if row["age_seconds"] is None else f"{row['age_seconds']:.0f} s"
        words = (
            row["backend"],
            row["id"],
            row["run"] or "",
            row["task"] or "",
            age,
            f"run {row['owner']}",
            row.get("fate", ""),
        )
        print("  ".join(word for word in words if word))
    for name, reason in silent.items():
        print(f"{name}: no answer: {reason.splitlines()[0]}")
    print(f"{len(rows)} sandboxes")
