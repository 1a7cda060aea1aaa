"""``rlcore tasks``: look at task folders, check them, prove them with their own solutions, make and split sets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rlcore.cli.app import command_group

__all__ = ["app"]

app = command_group("List, check, make and split tasks (Harbor / terminal-bench-2 folders).")

DirArgument: TypeAlias = Annotated[str, typer.Argument(metavar="DIR", help="Folder of task folders, or one of them.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Strict = Annotated[bool, typer.Option("--strict", help="Unknown keys of task.toml are errors.")]
SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="An option of the task set (oracle: sandbox, grader too): taskset.slice=[:5]",
    ),
]


@app.command("list")
def list_tasks(context: typer.Context, folder: DirArgument, sets: SetOption = None, as_json: AsJson = False) -> None:
    """The tasks that would run, in order."""
    from rlcore_tbench2.folder import TaskFolder

    def row(task: TaskFolder) -> dict[str, Any]:
        file = task.file
        return {
            "id": task.id,
            "kind": file.metadata.get("kind") or file.metadata.get("category"),
            "difficulty": file.metadata.get("difficulty"),
            "agent_s": file.agent.timeout_sec,
            "verifier_s": file.verifier.timeout_sec,
            "image": file.docker_image or ("Dockerfile" if task.dockerfile else None),
            "path": str(task.path),
        }

    report = _taskset(context, folder, sets).report()
    rows = [row(task) for task in report.folders]
    if as_json:
        _print_json({"tasks": rows, "skipped": len(report.skipped), "broken": len(report.problems)})
        return
    _print_table(rows, ["id", "kind", "difficulty", "agent_s", "verifier_s", "image"])
    print(f"{len(rows)} tasks, {len(report.skipped)} not supported, {len(report.problems)} broken")


@app.command("check")
def check(
    context: typer.Context,
    folder: DirArgument,
    strict: Strict = False,
    sets: SetOption = None,
    as_json: AsJson = False,
) -> int:
    """Read every folder: what is broken, what is not supported here, and what to know, one line each.

    Exits with 2 if a folder is broken or if there is no task at all.
    """
    report = _taskset(context, folder, [*(sets or ()), *(["taskset.strict=true"] if strict else ())]).report()
    rows = [{"level": "broken", "path": str(path), "message": message} for path, message in report.problems]
    rows += [{"level": "unsupported", "path": str(path), "message": reason} for path, reason in report.skipped]
    found = report.found
    rows += [{"level": "warning", "path": str(found.root), "message": text} for text in found.warnings]
    rows += [
        {"level": "warning", "path": str(one.path), "message": text} for one in report.folders for text in one.warnings
    ]
    rows += [
        {"level": "no task", "path": str(path), "message": "task.toml without instruction.md"}
        for path in found.templates
    ]
    good = len(report.folders)
    failed = bool(report.problems) or not good
    if as_json:
        _print_json({"ok": not failed, "tasks": good, "parked": len(found.parked), "problems": rows})
        return 2 if failed else 0
    for row in rows:
        message = row["message"].removeprefix(f"{row['path']}: ").replace("\n", " ")
        print(f"{row['level']:<11}  {row['path']}: {message}")
    parked = f", {len(found.parked)} hidden or archived folders not entered" if found.parked else ""
    print(f"{good} tasks can run, {len(report.skipped)} not supported, {len(report.problems)} broken{parked}")
    if not good and not report.problems:
        print(f"no task below {found.root}: a task folder has task.toml, instruction.md, environment/ and tests/")
    return 2 if failed else 0


@app.command("stats")
def stats(context: typer.Context, folder: DirArgument, sets: SetOption = None, as_json: AsJson = False) -> None:
    """What the tasks ask for: kinds, difficulties, clocks, resources, network, schema versions."""
    from rlcore_tbench2.numbers import statistics_of

    found = statistics_of(_taskset(context, folder, sets).report())
    if as_json:
        _print_json(found)
        return
    print("  ".join(f"{name} {count}" for name, count in found["folders"].items()))
    for name, counts in found["counts"].items():
        print(f"{name}: {', '.join(f'{value} x{count}' for value, count in counts.items())}")
    rows = [{"": name, **numbers} for name, numbers in found["numbers"].items()]
    _print_table(rows, ["", "stated", "min", "q1", "median", "q3", "max"])


@app.command("make")
def make(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to write; replaced if it is an earlier set.")
    ],
    split: Annotated[str, typer.Option(help="Pool of words: train, heldout or fresh.")] = "train",
    kinds: Annotated[
        str, typer.Option(help="Kinds, with commas between them; also 'trained' (default), 'never' and 'all'.")
    ] = "trained",
    per_kind: Annotated[int, typer.Option(help="Tasks of each kind.")] = 40,
    seed: Annotated[int, typer.Option(help="What is drawn follows from it.")] = 0,
    examples: Annotated[int, typer.Option(help="Solved examples of the same kind in each prompt.")] = 2,
    words: Annotated[Path | None, typer.Option(help="File of words in place of the split's pool.")] = None,
    demo_words: Annotated[Path | None, typer.Option(help="File of words for the examples.")] = None,
    base_image: Annotated[str, typer.Option(help="What the Dockerfiles start from.")] = "debian:bookworm-slim",
    as_json: AsJson = False,
) -> None:
    """Write the bundled task set: small shell tasks as real task folders, the same for the same arguments."""
    from rlcore_tbench2.bundled import KINDS, NEVER_TRAINED, TRAINED, write_tasks

    groups = {"trained": TRAINED, "never": NEVER_TRAINED, "all": tuple(KINDS)}
    names = groups.get(kinds) or tuple(name.strip() for name in kinds.split(",") if name.strip())
    write_tasks(
        folder,
        split=split,
        kinds=names,
        per_kind=per_kind,
        seed=seed,
        examples=examples,
        words=_words(words),
        demo_words=_words(demo_words),
        base_image=base_image,
    )
    if as_json:
        _print_json({"folder": str(folder), "tasks": len(names) * per_kind, "kinds": list(names)})
    else:
        print(f"{folder}: {len(names) * per_kind} tasks of {len(names)} kinds ({', '.join(names)})")


@app.command("split")
def split(
    context: typer.Context,
    folder: DirArgument,
    evaluation: Annotated[int, typer.Option("--eval", help="Tasks that are held out.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for train.json and eval.json.")],
    seed: Annotated[int, typer.Option(help="What is drawn follows from it.")] = 0,
    by: Annotated[
        str, typer.Option(help="Metadata keys whose shares are kept in both parts.")
    ] = "difficulty,category,kind",
    sets: SetOption = None,
    as_json: AsJson = False,
) -> None:
    """Split tasks into two disjoint parts, written as files for taskset.split; content hashes show later changes."""
    from rlcore_tbench2.split import write_split

    report = _taskset(context, folder, sets).report()
    _refuse_broken(report.problems)
    sizes = write_split(report, out, held_out=evaluation, seed=seed, by=[key.strip() for key in by.split(",") if key])
    if as_json:
        _print_json({"out": str(out), **sizes})
    else:
        print(f"{out / 'train.json'}: {sizes['train']} tasks; {out / 'eval.json'}: {sizes['eval']} tasks")


@app.command("oracle")
def oracle(
    context: typer.Context,
    folder: DirArgument,
    sandbox: Annotated[str, typer.Option(help="Name of the sandbox backend.")] = "local",
    concurrency: Annotated[int, typer.Option(min=1, help="Sandboxes at the same time.")] = 4,
    wrong: Annotated[
        bool, typer.Option("--wrong", help="Run solution/wrong.sh: every task must then fail its tests.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File of results, one line each; what it holds is not run again.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for a solution whose task states no clock.")] = 3600.0,
    sets: SetOption = None,
    as_json: AsJson = False,
) -> int:
    """Run each task's own solution through sandbox and grader: what does not pass cannot be learned.

    Exits with 1 if a task does not do as it should.
    """
    import secrets
    import tempfile

    from rlcore.resolve import options_class
    from rlcore.rollout.lease import SandboxLease

    from rlcore_tbench2.grader import TaskGrader
    from rlcore_tbench2.oracle import run_oracle
    from rlcore_tbench2.taskset import TaskFolders

    plugins = context.obj.plugins
    options = _options(
        context,
        folder,
        sets,
        sandbox=options_class(plugins, "sandbox", sandbox),
        taskset=TaskFolders.Config,
        grader=TaskGrader.Config,
    )
    backend = plugins.load("sandbox", sandbox)(options["sandbox"])
    grader = TaskGrader(options["grader"])
    tasks = TaskFolders(options["taskset"]).load()

    def show(row: Mapping[str, Any], done: int) -> None:
        verdict = "no verdict" if row["reward"] is None else f"reward {row['reward']:g}"
        failed = "" if row["ok"] else f"  FAILED {row['error'] or ''}"
        if not as_json and (failed or len(tasks) <= 50):
            print(f"[{done}/{len(tasks)}] {row['task']}: {verdict} in {row['seconds']:.1f} s{failed}", flush=True)

    async def run() -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="rlcore-oracle-") as scratch:
            ledger = Path(scratch, "sandboxes.jsonl") if out is None else out.with_suffix(".sandboxes.jsonl")
            run_id = f"oracle-{secrets.token_hex(4)}"
            lease = SandboxLease(backend, backend_name=sandbox, ledger_path=ledger, run_id=run_id)
            try:
                return await run_oracle(
                    tasks,
                    lambda spec, task_id: lease.sandbox(spec, task_id=task_id),
                    grader,
                    concurrency=concurrency,
                    wrong=wrong,
                    out=out,
                    timeout=timeout,
                    on_result=show,
                )
            finally:
                await lease.aclose()

    rows = asyncio.run(run())
    as_wanted = sum(row["ok"] for row in rows)
    passed = sum(row["reward"] is not None and row["reward"] >= 1 for row in rows)
    ok = as_wanted == len(tasks)
    if as_json:
        _print_json({"ok": ok, "tasks": len(tasks), "passed": passed, "wrong": wrong, "results": rows})
    else:
        what = "wrong solutions" if wrong else "solutions"
        nothing = sum(row["reward"] is None for row in rows)
        print(f"{passed} of {len(rows)} {what} pass ({nothing} without a verdict); {as_wanted} as it should be")
    return 0 if ok else 1


def _taskset(context: typer.Context, folder: str, sets: Sequence[str] | None) -> Any:
    from rlcore_tbench2.taskset import TaskFolders

    return TaskFolders(_options(context, folder, sets, taskset=TaskFolders.Config)["taskset"])


def _options(context: typer.Context, folder: str, sets: Sequence[str] | None, **sections: Any) -> dict[str, Any]:
    """The typed options of these sections; the task set's folder is the one on the line."""
    from rlcore.resolve import Layer, build_options, set_layer

    line = Layer("command line", {"taskset": {"path": folder}})
    return build_options(context.obj.plugins, [line, set_layer(sets or ())], sections)


def _refuse_broken(problems: Iterable[tuple[Path, str]]) -> None:
    from rlcore.errors import TaskError

    messages = [message for _, message in problems]
    if messages:
        raise TaskError("\n".join(messages))


def _words(path: Path | None) -> list[str] | None:
    from rlcore.errors import ConfigError

    if path is None:
        return None
    try:
        return path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False, default=str))


def _print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[number]) for line in [list(columns), *cells]) for number in range(len(columns))]
    for line in [list(columns), *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
