"""Someone else's plugins, installed by pip, change a run by name; nothing of the core changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rlcore_quickstart import tiny_model_path

HERE = Path(__file__).parent
OFFERS = {
    "jail": ("busybox-jail", "1.1.0", {("sandbox", "jail")}),
    "vowels": ("vowels-env", "0.3.0", {("taskset", "vowels"), ("agent", "vowels")}),
    "noting": ("noting-sandbox", "2.0.1", {("sandbox", "noting")}),
    "root-tis": ("root-tis", "1.4.0", {("correction", "root_tis")}),
    "soft-clip": ("soft-clip", "0.9.0", {("loss", "soft_clip")}),
}


def test_they_are_found_and_keep_the_rules(foreign: Any) -> None:
    plugins = {plugin["name"]: plugin for plugin in json.loads(foreign.rlcore("plugins", "--json"))}
    for name, (distribution, version, offers) in OFFERS.items():
        plugin = plugins[name]
        assert (plugin["status"], plugin["distribution"], plugin["version"]) == ("ok", distribution, version)
        assert {(offer["kind"], offer["name"]) for offer in plugin["offers"]} == offers
    foreign.rlcore("plugins", "check", *OFFERS)
    where = foreign.run("-c", "import root_tis, rlcore; print(root_tis.__file__, rlcore.__file__)").stdout.split()
    assert str(foreign.path) in where[0], "it is installed, not found in the sources"
    assert str(foreign.path) not in where[1]


@pytest.mark.parametrize("name", ["busybox-jail", "vowels-env", "root-tis", "soft-clip"])
def test_their_own_tests_pass(foreign: Any, name: str, tmp_path: Path, processes_with: Any) -> None:
    shutil.copytree(HERE / name / "tests", tmp_path / "tests")
    done = foreign.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert processes_with(str(tmp_path)) == [], "a cancelled start left a process behind"


def test_an_own_environment_is_learned(foreign: Any, tmp_path: Path) -> None:
    """No sandbox, a reward in Python, a foreign correction: the mean reward climbs."""
    foreign.rlcore(
        *("train", "--config", HERE / "vowels-env" / "run.toml", "--set", f"model.path={tiny_model_path()}"),
        *("--set", "run.id=vowels", "--set", "correction.name=root_tis", "--set", "correction.high=1.25"),
        cwd=tmp_path,
    )
    run = tmp_path / "runs" / "vowels"
    summary = json.loads((run / "summary.json").read_text())
    rewards = summary["reward_by_step"]
    assert summary["steps"] == 20
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.25, rewards
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["config"]["correction"] == {"name": "root_tis", "high": 1.25}
    assert {"vowels", "root-tis"} <= {plugin["name"] for plugin in manifest["plugins"]["plugins"]}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["root_tis_weight"] == pytest.approx(1.0, abs=0.01) for line in metrics if "skipped" not in line)


def test_an_own_environment_is_evaluated(foreign: Any, tmp_path: Path) -> None:
    """No folder of tasks, no sandbox and no grader: the environment is named as for training, or by the run's file."""
    model = ("--model", tiny_model_path(), "--set", "taskset.count=3", "-k", "2", "--json")
    named = ("--set", "taskset.name=vowels", "--set", "agent.name=vowels", "--set", "agent.letters=e")
    short = ("--set", "budget.tokens_per_turn=8", "--set", "engine.threads=1")
    by_name = json.loads(foreign.rlcore("eval", *model, *named, *short, cwd=tmp_path))
    by_file = json.loads(
        foreign.rlcore("eval", "--config", HERE / "vowels-env" / "run.toml", *model, "--out", "o", cwd=tmp_path)
    )
    for summary in (by_name, by_file):
        assert (summary["attempts"], summary["no_verdict"], summary["ends"]) == (6, 0, {"answered": 6})
        assert set(summary["by_task"]) == {"sing-0", "sing-1", "sing-2"}
    assert by_name["directory"] == "evals/vowels-tiny"
    config = json.loads((tmp_path / "evals/vowels-tiny/evaluation.json").read_text())["config"]
    assert config["sandbox"] is config["grader"] is None


def test_a_foreign_sandbox_runs_the_commands(foreign: Any, tmp_path: Path) -> None:
    foreign.rlcore(
        *("train", "quickstart", "--model", "tiny", "--set", "run.id=noted", "--set", "run.steps=1"),
        *("--set", "sandbox.name=noting", "--set", f"sandbox.notes={tmp_path / 'notes.jsonl'}"),
        *("--set", "eval.before_and_after=false", "--set", "rollout.tasks_per_step=2"),
        cwd=tmp_path,
    )
    notes = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    attempts = [json.loads(line) for line in (tmp_path / "runs/noted/attempts.jsonl").read_text().splitlines()]
    assert len({note["sandbox"] for note in notes}) == len(attempts) == 16
    assert all(attempt["reward"] is not None for attempt in attempts)


def test_a_foreign_loss_is_listed_and_trains(foreign: Any, tmp_path: Path) -> None:
    [listed] = [entry for entry in json.loads(foreign.rlcore("losses", "--json")) if entry["name"] == "soft_clip"]
    assert (listed["kind"], listed["distribution"]) == ("loss", "soft-clip")
    assert "gradient / policy gradient" in foreign.rlcore("losses", "show", "soft_clip")
    foreign.rlcore(
        *("train", "quickstart", "--model", "tiny", "--set", "run.id=bent", "--set", "run.steps=2"),
        *("--set", "loss.name=soft_clip", "--set", "loss.width=0.2", "--set", "eval.before_and_after=false"),
        *("--set", "rollout.tasks_per_step=4"),
        cwd=tmp_path,
    )
    run = tmp_path / "runs" / "bent"
    assert json.loads((run / "manifest.json").read_text())["config"]["loss"] == {"name": "soft_clip", "width": 0.2}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("soft_clip_bend" in line for line in metrics)


def test_a_new_plugin_works_from_its_first_minute(foreign: Any, tmp_path: Path) -> None:
    """``rlcore plugins new``, ``pip install -e``, its own tests, and its name in a configuration."""
    foreign.rlcore("plugins", "new", "Brand-New", "--kind", "advantage", cwd=tmp_path)
    foreign.install("-e", tmp_path / "Brand-New")
    done = foreign.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path / "Brand-New")
    assert done.returncode == 0, done.stdout
    foreign.rlcore("plugins", "check", "brand-new")
    shown = foreign.rlcore("config", "show", "quickstart", "--set", "advantage.name=brand_new", "--json")
    assert json.loads(shown)["advantage"] == {"name": "brand_new", "scale": 1.0}


def test_left_out_it_is_one_clear_error(foreign: Any) -> None:
    done = foreign.run(
        *("-m", "rlcore", "--no-plugin", "root-tis", "config", "show", "quickstart"),
        *("--set", "correction.name=root_tis"),
    )
    assert done.returncode == 2
    assert "correction.name: no correction named 'root_tis'" in done.stderr


def test_the_guide_shows_what_is_tested() -> None:
    guide = (HERE.parents[1] / "docs" / "your-own-agent.md").read_text(encoding="utf-8")
    example = HERE / "vowels-env"
    assert (example / "src/vowels_env/environment.py").read_text(encoding="utf-8") in guide
    for path in ("src/vowels_env/plugin.py", "run.toml", "tests/test_environment.py"):
        lines = (example / path).read_text(encoding="utf-8").splitlines()
        shown = [line for line in lines if line in guide]
        assert len(shown) >= len(lines) * 0.6, path
