"""The recipe as a whole: every figure with its reason, what contradicts is refused, and a run that would start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from glm52_plugin.figures import LAYOUTS, REASONS
from glm52_plugin.model import GLM52, TOY
from glm52_plugin.recipe import Glm52Recipe
from rlcore.cli import main
from rlcore.errors import ConfigError, PluginError
from rlcore.plan.report import make_plan
from rlcore.plugins import Plugins
from rlcore.resolve import absent


def leaves(values: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {at: values}
    return {k: v for key, inner in values.items() for k, v in leaves(inner, f"{at}.{key}" if at else key).items()}


def test_every_figure_has_a_reason_and_every_reason_a_figure() -> None:
    figures = leaves(dict(Glm52Recipe(Glm52Recipe.Config()).configuration()))
    assert figures.keys() == REASONS.keys()


REFERENCE = {
    "rollout.tasks_per_step": 8, "rollout.samples_per_task": 8, "rollout.in_flight": 128, "rollout.temperature": 0.8,
    "budget.tokens_per_turn": 8192, "budget.tokens_per_session": 65536, "budget.turns": 30, "budget.seconds": 3600.0,
    "agent.command_timeout": 1200.0, "agent.max_output": 4000,
    "correction.name": "token_tis", "correction.low": 0.0, "correction.high": 2.0,
    "loss.clip_low": 0.2, "loss.clip_high": 0.28, "loss.kl_coef": 0.0, "loss.entropy_coef": 0.0,
    "trainer.tp": 2, "trainer.pp": 4, "trainer.split": (18, 20, 20, 20), "trainer.cp": 4, "trainer.ep": 8,
    "trainer.etp": 1, "trainer.micro_tokens": 8192, "trainer.logprob_chunk": 16384, "trainer.recompute": "full",
    "trainer.lr": 1e-6, "trainer.weight_decay": 0.1, "trainer.betas": (0.9, 0.98), "trainer.bucket_gib": 2.0,
    "engine.gpus": 4, "engine.ep": 4, "engine.dp_attention": 4, "engine.page_size": 64, "engine.max_running": 256,
    "engine.memory_fraction": 0.85, "engine.speculative": (1, 1, 2), "engine.tool_parser": "glm47",
    "engine.reasoning_parser": "glm45", "engine.kv_dtype": "fp8_e4m3", "engine.pause": "in_place",
    "eval.every": 10, "eval.samples_per_task": 2, "eval.temperature": 0.8,
    "taskset.min_cpus": 2.0, "taskset.min_memory_mb": 4096, "taskset.min_disk_mb": 10240,
    "sandbox.auto_stop_min": 30, "sandbox.auto_delete_min": 120,
}  # fmt: skip


def test_the_figures_are_those_of_the_reference() -> None:
    figures = leaves(dict(Glm52Recipe(Glm52Recipe.Config()).configuration()))
    assert {key: figures[key] for key in REFERENCE} == REFERENCE


@pytest.mark.parametrize("layers", sorted(LAYOUTS))
@pytest.mark.parametrize("inference", ["balanced", "low-latency"])
def test_every_cut_and_profile_is_valid_and_fits(resolved: Any, layers: int, inference: str) -> None:
    serving = 2 if inference == "low-latency" else LAYOUTS[layers]["nodes"] - LAYOUTS[layers]["training_nodes"]
    nodes = LAYOUTS[layers]["training_nodes"] + serving
    made = resolved(f"recipe.layers={layers}", f"recipe.inference={inference}", f"recipe.nodes={nodes}")
    plan = make_plan(made.recipe.plan(made.config))
    assert not plan.problems
    assert plan.kv_tokens >= 65536


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.split=[20,20,19,19]", "stage 2 starts at layer 21.*IndexShare"),
        ("trainer.split=[18,20,20,19]", "has 77 layers, the model 78"),
        ("trainer.split=[2,25,25,26]", "fewer than the 3 dense ones"),
        ("trainer.split=[18,20,40]", "has 3 stages, PP is 4"),
        ("trainer.tp=3", "does not divide 32 GPUs"),
        ("trainer.ep=7", "EP 7 does not divide 256 experts"),
        ("trainer.ep=16", "does not divide the 8 ranks of a stage"),
        ("budget.tokens_per_session=65535", "does not divide into 2 × CP 4 parts"),
        ("trainer.optimizer_state=gpu", "needs 442 GiB on the fullest rank.*stream it"),
        ("trainer.micro_tokens=512", "far fewer than a row"),
        ("budget.tokens_per_session=4096", "tokens_per_turn=8192 is above tokens_per_session=4096"),
        ("rollout.in_flight=32", "never fill a batch of 8 × 8 = 64"),
        ("rollout.max_age=0", "thrown away"),
        ("rollout.max_age=1", "already 2 steps old"),
        ("engine.max_running=8", "8 engines × 8 requests are fewer than rollout.in_flight 128"),
        ("engine.memory_fraction=0.75", "holds 26,396 tokens, fewer than one sequence of 65,536"),
        ("engine.ep=3", "EP 3 does not divide 256 experts"),
        ("engine.quantization=none", "holds 0 tokens"),
        ("sandbox.auto_delete_min=60", "a sandbox lives 3600 s, the attempt's clock is 3600 s"),
        ("sandbox.auto_stop_min=20", "one command may take 1200 s"),
        ("agent.command_timeout=3601", "more than the attempt's clock"),
        ("eval.every=-1", "eval.every.*greater than or equal to 0"),
        ("recipe.nodes=8", "leave none to serve.*at least 9"),
        ("recipe.nodes=4", "training_nodes: 8 of 4 nodes"),
        ("recipe.replay=runs/old", "training_nodes|serve|does not divide|replay"),
        ("recipe.gpu=h20", "did you mean 'h200'"),
        ("recipe.layers=7", "recipe.layers"),
        ("correction.low=3", "low"),
    ],
)
def test_what_contradicts_is_refused_with_the_key(resolved: Any, setting: str, message: str) -> None:
    import re

    if setting == "recipe.replay=runs/old":
        resolved(setting, "recipe.nodes=8")  # eight nodes are enough without engines
        setting, message = "recipe.replay=runs/old;recipe.training_nodes=8", "a replay needs no engine"
    with pytest.raises(ConfigError) as error:
        resolved(*setting.split(";"))
    assert re.search(message, str(error.value)), error.value


def test_low_latency_needs_pairs_of_nodes(resolved: Any) -> None:
    with pytest.raises(ConfigError, match="engines of 8 GPUs do not divide 28 GPUs"):
        resolved("recipe.inference=low-latency", "recipe.nodes=15")


def test_all_contradictions_are_said_at_once(resolved: Any) -> None:
    with pytest.raises(ConfigError) as error:
        resolved("rollout.in_flight=32", "trainer.ep=7", "sandbox.auto_delete_min=30")
    assert "4 contradictions" in str(error.value)


@pytest.mark.fault("CFG-05")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainr.lr=1", "trainr.*did you mean 'trainer'"),
        ("trainer.learning_rate=1", "trainer.learning_rate: unknown key"),
        ("engine.memory_fracton=0.8", "did you mean 'memory_fraction'"),
        ("recipe.node=4", "did you mean 'nodes'"),
        ("eval.taskset.pth=x", "did you mean 'path'"),
    ],
)
def test_a_typo_is_an_error_at_every_level(resolved: Any, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(setting)


@pytest.mark.fault("CFG-01")
@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("2e-5", 2e-5), ("1E-3", 1e-3), (".5", 0.5)])
def test_a_learning_rate_arrives_as_the_number_that_was_written(resolved: Any, text: str, value: float) -> None:
    assert resolved(f"trainer.lr={text}").config.trainer.options.lr == value


@pytest.mark.fault("CFG-04")
def test_the_shown_configuration_is_read_back_as_the_same(resolved: Any, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["config", "show", "glm52", "--set", "engine.speculative=null"])
    (tmp_path / "run.toml").write_text(capsys.readouterr().out, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["config", "show", "--config", str(tmp_path / "run.toml"), "--set", "engine.speculative=null", "--json"])
    assert not ended.value.code
    again = json.loads(capsys.readouterr().out)
    assert again == resolved("engine.speculative=null").config.model_dump(mode="json")


def test_it_is_the_default_of_its_plugin_and_is_selected_for_the_model(plugins: Plugins, tmp_path: Path) -> None:
    """By its ``config.json``, whatever the folder is called; a machine without a GPU does not make the model small."""
    assert plugins.default_recipe("glm52") == "glm52"

    def selected(config: Any, hardware: str) -> str | None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return plugins.select_recipe(str(tmp_path), hardware)

    assert selected(GLM52, "nvidia gb300") == selected(GLM52, "cpu") == "glm52"
    assert selected(TOY, "cpu") == "glm52-toy"
    assert selected(TOY, "nvidia gb300") is None
    assert selected({"model_type": "llama", "hidden_size": 6144}, "cpu") is None
    assert selected([], "cpu") is None
    assert plugins.select_recipe("/not/there/GLM-5.2-FP8", "cpu") == "glm52"
    assert plugins.select_recipe("llama", "cpu") is None


def test_a_run_on_the_model_finds_its_recipe(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM52))
    with pytest.raises(SystemExit) as ended:
        main(["config", "show", "--set", f"model.path={tmp_path}", "--json"])
    shown, said = capsys.readouterr()
    assert not ended.value.code
    assert said == f"rlcore: recipe glm52, for the model {tmp_path}\n"
    config = json.loads(shown)
    assert (config["recipe"]["name"], config["model"]["path"]) == ("glm52", str(tmp_path))


@pytest.mark.parametrize(("kind", "name"), [("trainer", "megatron"), ("engine", "sglang")])
def test_what_is_not_installed_types_its_options_and_names_its_distribution(
    plugins: Plugins, resolved: Any, kind: str, name: str
) -> None:
    config = resolved().config
    offer = plugins.offer(kind, name)
    if not offer.needs:
        return  # the real one is installed
    with pytest.raises(PluginError, match=f"{kind} '{name}' is not installed: pip install {offer.needs}"):
        plugins.load(kind, name)(getattr(config, kind).options)
    assert any(name in p.message and offer.needs in p.remedy for p in absent(plugins, config))


# --- the dry run


def dry_run(capsys: Any, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--plugin", "glm52", "--dry-run", *words])
    assert not ended.value.code
    return str(capsys.readouterr().out)


def test_the_dry_run_shows_origins_and_reasons(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[rollout]\nin_flight = 192\n")
    out = dry_run(capsys, "--config", str(tmp_path / "mine.toml"), "--set", "trainer.lr=2e-6")
    assert f"rollout.in_flight = 192  # file {tmp_path}/mine.toml\n" in out
    assert "trainer.lr = 2e-06  # --set trainer.lr\n" in out
    assert "correction.low = 0.0  # recipe glm52: 0: a floor of 0.5" in out


def test_the_dry_run_covers_every_node_once(capsys: Any) -> None:
    cluster = json.loads(dry_run(capsys, "--json"))["cluster"]
    assert sorted(node for plan in cluster["plans"] for node in plan["nodes"]) == list(range(16))
    low = json.loads(dry_run(capsys, "--json", "--inference", "low-latency"))["cluster"]
    first, second = (plan for plan in low["plans"] if plan["role"].startswith("engine"))
    assert first["nodes"] == [8, 10, 12, 14]
    assert second["nodes"] == [9, 11, 13, 15]
    assert [p["commands"][-1][p["commands"][-1].index("--node-rank") + 1] for p in (first, second)] == ["0", "1"]


def test_only_the_driver_gets_credentials_and_only_as_references(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAYTONA_API_KEY", "dtn_very_secret")
    out = dry_run(capsys, "--json")
    assert "very_secret" not in out
    plans = json.loads(out)["cluster"]["plans"]
    assert [("DAYTONA_API_KEY" in plan["env"]) for plan in plans] == [plan["nodes"] == [0] for plan in plans]
    assert plans[0]["env"]["DAYTONA_API_KEY"] == "${DAYTONA_API_KEY}"


def test_a_replay_starts_no_engine(capsys: Any) -> None:
    cluster = json.loads(dry_run(capsys, "--json", "--replay", "runs/old", "--nodes", "8"))["cluster"]
    assert cluster["nodes"] == 8
    assert not any("sglang.launch_server" in c for p in cluster["plans"] for c in p["commands"])


@pytest.mark.parametrize(
    "words",
    [
        ["plugins"],
        ["train", "--plugin", "glm52", "--dry-run", "--json"],
        ["plan", "glm52", "--suggest"],
        ["train", "--plugin", "glm52", "--preflight"],
        ["config", "show", "glm52"],
    ],
)
def test_it_is_light_and_needs_nothing_around_it(tmp_path: Path, words: list[str]) -> None:
    """No folder, no variable, no torch, under 2 s of CPU."""
    code = (
        "import sys, resource, rlcore.cli as c\n"
        f"try: c.main({words!r})\n"
        "except SystemExit as e: status = e.code\n"
        "u = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = [m for m in ('torch', 'ray', 'numpy', 'pyarrow', 'transformers', 'openai', 'daytona') "
        "if m in sys.modules]\n"
        "print(status, u.ru_utime + u.ru_stime, heavy, file=sys.stderr)\n"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    status, seconds, heavy = done.stderr.strip().splitlines()[-1].split(maxsplit=2)
    assert status == ("2" if "--preflight" in words else "0")
    assert heavy == "[]"
    assert float(seconds) < 2


# --- the planner on this recipe


def test_the_plan_reproduces_the_published_figures(resolved: Any) -> None:
    made = resolved()
    plan = make_plan(made.recipe.plan(made.config))
    assert [round(stage.optimizer / 1e9) for stage in plan.stages] == [226, 297, 297, 298]
    assert plan.kv_tokens == pytest.approx(553_000, abs=1000)
    assert plan.fits == "streamed"
    assert plan.sync_bytes == 2 * 743_377_019_904
    assert plan.time is not None
    assert plan.time.seconds_with_evaluation - plan.time.seconds == 360
    rows = {row.what: row for row in plan.request.compare(plan)}
    assert "743,377,019,904 (753,329,940,480)" in rows["parameters"].derived
    assert "788" in rows["cell of the KV cache, bytes a token and layer"].derived
    assert "26,396 at 0.75" in rows["KV tokens of a rank at memory fraction 0.85 and 0.75"].derived


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        (["--nodes", "24"], 0, "24 nodes: 8 train, 16 serve"),
        (["--nodes", "10"], 0, "10 nodes: 8 train, 2 serve"),
        (["--gpu", "b200"], 2, "cannot run: engine: the cache of one rank holds 0 tokens"),
        (["--gpu", "h200", "--suggest"], 2, "layouts that do not work"),
        (["--set", "trainer.split=[20,20,19,19]"], 2, "IndexShare"),
        (["--layers", "20"], 0, "first 20 layers on 6 nodes"),
    ],
)
def test_the_plan_takes_other_hardware_and_says_what_does_not_fit(
    capsys: Any, words: list[str], status: int, shown: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "glm52", *words])
    captured = capsys.readouterr()
    assert (ended.value.code or 0) == status
    assert shown in captured.out + captured.err


def test_a_recipe_of_one_process_says_so(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "quickstart", "--dry-run", "--set", "trainer.lr=1e-5"])
    assert not ended.value.code
    out = capsys.readouterr().out
    assert "trainer.lr = 1e-05  # --set trainer.lr" in out
    assert "# everything runs in one process, here" in out
