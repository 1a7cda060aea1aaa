"""``rlcore check``: whether a backend keeps its contract here, by trying."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rlcore.cli import Globals
from rlcore.cli.app import command_group
from rlcore.errors import ConfigError
from rlcore.plugins import nearest

if TYPE_CHECKING:
    from rlcore.testing.sandbox import Outcome

__all__ = ["app"]

app = command_group("Check that a backend works here.")


@app.command("sandbox")
def sandbox(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A sandbox backend: local, docker, …")],
    image: Annotated[str | None, typer.Option(help="Image of the sandboxes, for backends that have images.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="An option of the backend.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Behaviours to try, with commas; default: all.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A declared gap that is none fails too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Run the conformance kit on a backend: real sandboxes, labelled, and swept at the end.

    Credentials and addresses are the provider's own: DOCKER_HOST, DAYTONA_API_KEY, MODAL_TOKEN_ID, … Exits with 1 if a
    required behaviour is not there.
    """
    from rlcore.cli._backends import build_backend
    from rlcore.testing.sandbox import BEHAVIOURS, run_kit
    from rlcore.types import SandboxSpec

    known: Globals = context.obj
    wanted = [one.strip() for one in only.split(",")] if only else None
    for one in wanted or ():
        if one not in BEHAVIOURS:
            raise ConfigError(f"--only {one}: no behaviour of the kit{nearest(one, BEHAVIOURS)}")
    backend = build_backend(known.plugins, name, sets or ())
    width = max(map(len, BEHAVIOURS))

    def show(outcome: Outcome) -> None:
        if not as_json:
            detail = outcome.detail or BEHAVIOURS[outcome.name].text
            print(f"{outcome.status:6}  {outcome.name:{width}}  {outcome.seconds:6.2f} s  {detail}", flush=True)

    outcomes = asyncio.run(run_kit(backend, SandboxSpec(image=image), only=wanted, report=show))
    count = {status: sum(one.status == status for one in outcomes) for status in ("pass", "fail", "gap", "no gap")}
    ok = not count["fail"] and not (strict and count["no gap"])
    if as_json:
        rows = [{**asdict(one), "text": BEHAVIOURS[one.name].text} for one in outcomes]
        print(json.dumps({"sandbox": name, "ok": ok, **count, "behaviours": rows}, indent=2))
    else:
        surprise = f", {count['no gap']} declared as gaps that are none" if count["no gap"] else ""
        print(f"{name}: {count['pass']} pass, {count['fail']} fail, {count['gap']} declared gaps{surprise}")
    return 0 if ok else 1
