"""Broken environments: each is named with its remedy, all problems in one run, bounded in time, no secret printed."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from glm52_plugin import cluster, preflight
from glm52_plugin.model import GLM52
from rlcore.cli import main
from rlcore_launchers.node import addresses
from rlcore_tbench2.bundled import write_tasks

SECRET = "dtn_1f9c0ffee_do_not_print"
VERSIONS = {
    "ray": "2.60.0",
    "megatron-core": "0.19.2",
    "sglang": "0.5.23",
    "transformers": "5.24.0",
    "torch": "2.13.0+cpu",
}
TENSORS: dict[str, list[int]] = {
    "model.embed_tokens.weight": [154880, 6144],
    "lm_head.weight": [154880, 6144],
    "model.norm.weight": [6144],
    "model.layers.77.input_layernorm.weight": [6144],
    "model.layers.0.self_attn.q_a_proj.weight": [2048, 6144],
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": [576, 6144],
    "model.layers.0.mlp.gate_proj.weight": [12288, 6144],
}


def write_shard(path: Path, tensors: dict[str, list[int]]) -> None:
    """A safetensors file of the right size whose data are a hole."""
    header, offset = {}, 0
    for name, shape in tensors.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def write_checkpoint(folder: Path, **changes: Any) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**GLM52, **changes}))
    (folder / "tokenizer.json").write_text("{}")
    names = list(TENSORS)
    shards = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for shard, inside in shards.items():
        write_shard(folder / shard, {name: TENSORS[name] for name in inside})
    index = {"weight_map": {name: shard for shard, inside in shards.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@dataclass
class World:
    """An environment in which nothing is wrong, to be broken."""

    path: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    versions: dict[str, str | None] = field(default_factory=lambda: dict(VERSIONS))
    sets: list[str] = field(default_factory=list)
    gpus: int = 4

    def set(self, *settings: str) -> None:
        self.sets += settings

    def problems(self) -> tuple[int, list[dict[str, Any]], str]:
        """Exit status, problems without those of trainers that are not installed, everything that was printed."""
        words = ["train", "--plugin", "glm52", "--preflight", "--json"]
        for setting in self.sets:
            words += ["--set", setting]
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = self.capsys.readouterr()
        found = json.loads(out) if out.strip() else []
        return int(ended.value.code or 0), [p for p in found if "rlcore-megatron" not in p["remedy"]], out + err


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[World]:
    made = World(tmp_path, monkeypatch, capsys)
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "bf16")
    write_checkpoint(tmp_path / "fp8")
    write_tasks(tmp_path / "tasks" / "train", split="train", kinds=["copy"], per_kind=2, seed=0)
    write_tasks(tmp_path / "tasks" / "heldout", split="heldout", kinds=["copy"], per_kind=2, seed=0)
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text('#!/bin/sh\nfor n in $(cat "$0.gpus"); do echo "NVIDIA GB300, 284208"; done\n')
    smi.chmod(0o755)
    (tmp_path / "bin" / "nvidia-smi.gpus").write_text("1 2 3 4")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("DAYTONA_API_KEY", SECRET)
    monkeypatch.setenv("FABRIC_PREFIX", addresses()[0])
    monkeypatch.setenv("FABRIC_IFNAME", "eth0")
    for name in ("HEAD_ADDRESS", "HEAD_TIME", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in made.versions:
            return real(name)
        if (found := made.versions[name]) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2_000_000_000_000))
    monkeypatch.setattr(preflight, "SECONDS", 20.0)  # tests run beside others
    ray, engine = free_ports(2)
    monkeypatch.setattr(cluster, "RAY_PORT", ray)

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(401)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    made.set(
        f"recipe.model={tmp_path}/bf16", f"recipe.served_model={tmp_path}/fp8", f"recipe.scratch={tmp_path}/scratch",
        f"sandbox.api_url=http://127.0.0.1:{server.server_port}/api", f"engine.port={engine}",
    )  # fmt: skip
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def test_nothing_is_found_where_nothing_is_wrong(world: World) -> None:
    _, found, printed = world.problems()
    assert [p for p in found if p["fatal"]] == []
    assert SECRET not in printed


def key_file(world: World, text: str | None, mode: int = 0o600) -> None:
    world.monkeypatch.delenv("DAYTONA_API_KEY")
    path = world.path / "key"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    world.set(f"sandbox.api_key.file={path}")


def shard(world: World, change: Callable[[Path], None]) -> None:
    change(world.path / "bf16" / "b.safetensors")


def cut_off(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def other_shape(path: Path) -> None:
    write_shard(path, {n: ([7] if n == "model.norm.weight" else s) for n, s in list(TENSORS.items())[2:]})


def lose_tensor(path: Path) -> None:
    write_shard(path, dict(list(TENSORS.items())[3:]))


def configure_model(world: World, **changes: Any) -> None:
    (world.path / "bf16" / "config.json").write_text(json.dumps({**GLM52, **changes}))


def share_tasks(world: World) -> None:
    shutil.rmtree(world.path / "tasks" / "heldout")
    shutil.copytree(world.path / "tasks" / "train", world.path / "tasks" / "heldout")


def break_task(world: World) -> None:
    next((world.path / "tasks" / "train").glob("*/task.toml")).write_text("[agent\n")


def listen(world: World) -> None:
    taken = socket.socket()
    taken.bind(("", 0))
    taken.listen()
    world.monkeypatch.setattr(cluster, "RAY_PORT", taken.getsockname()[1])
    world.monkeypatch.setattr(world, "taken", taken, raising=False)  # closed with the world


def block_scratch(world: World) -> None:
    (world.path / "scratch").write_text("a file")


def fill_disk(world: World) -> None:
    world.monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000_000_000))


BROKEN: dict[str, tuple[Callable[[World], Any], str, str]] = {
    "package missing": (lambda w: w.versions.update(ray=None), "packages", "ray is not installed"),
    "package too old": (lambda w: w.versions.update(sglang="0.4.9"), "packages", "sglang is 0.4.9; from 0.5"),
    "package too new": (lambda w: w.versions.update({"megatron-core": "0.20.0"}), "packages", "below 0.20"),
    "key not set": (lambda w: w.monkeypatch.delenv("DAYTONA_API_KEY"), "credentials", "DAYTONA_API_KEY is not set"),
    "key empty": (lambda w: w.monkeypatch.setenv("DAYTONA_API_KEY", " "), "credentials", "not set or empty"),
    "key file missing": (lambda w: key_file(w, None), "credentials", "cannot be read"),
    "key file readable for all": (lambda w: key_file(w, SECRET, 0o644), "credentials", "mode 644"),
    "key file empty": (lambda w: key_file(w, "\n"), "credentials", "is empty"),
    "no model": (lambda w: shutil.rmtree(w.path / "bf16"), "model", "bf16 is not there"),
    "other model": (lambda w: configure_model(w, hidden_size=7168), "model", "hidden_size is 7168, GLM-5.2 has 6144"),
    "no config": (lambda w: (w.path / "bf16/config.json").unlink(), "model", "config.json"),
    "no tokenizer": (lambda w: (w.path / "bf16/tokenizer.json").unlink(), "model", "no tokenizer.json"),
    "index broken": (lambda w: (w.path / "bf16/model.safetensors.index.json").write_text("{}"), "model", "index.json"),
    "shard missing": (lambda w: shard(w, Path.unlink), "model", "1 of 2 shards are missing: b.safetensors"),
    "shard cut off": (lambda w: shard(w, cut_off), "model", "cut off while it was copied"),
    "shard is no safetensors": (
        lambda w: shard(w, lambda p: p.write_text("x" * 99) and None),
        "model",
        "no safetensors",
    ),
    "tensor of another shape": (lambda w: shard(w, other_shape), "model", "model.norm.weight is [7]"),
    "tensor missing": (lambda w: shard(w, lose_tensor), "model", "model.norm.weight"),
    "no served model": (lambda w: shutil.rmtree(w.path / "fp8"), "served model", "fp8 is not there"),
    "no tasks": (lambda w: shutil.rmtree(w.path / "tasks/train"), "tasks", "taskset: tasks/train"),
    "broken task": (break_task, "tasks", "task.toml"),
    "held-out tasks are trained": (share_tasks, "tasks", "2 tasks are in taskset and in eval.taskset"),
    "provider not reachable": (lambda w: w.set("sandbox.api_url=http://127.0.0.1:9/api"), "sandbox", "does not answer"),
    "quota below in-flight": (lambda w: w.set("recipe.sandbox_cpu_quota=200"), "quota", "128 attempts of 2 need 256"),
    "disk too small": (fill_disk, "scratch", "50 GB (1e9 bytes) are free, 1,193 GB"),
    "disk not writable": (block_scratch, "scratch", "cannot be written"),
    "no fabric prefix": (lambda w: w.monkeypatch.delenv("FABRIC_PREFIX"), "fabric", "FABRIC_PREFIX is not set"),
    "wrong fabric prefix": (lambda w: w.monkeypatch.setenv("FABRIC_PREFIX", "10.99."), "fabric", "'10.99.'; there are"),
    "head not reachable": (lambda w: w.monkeypatch.setenv("HEAD_ADDRESS", "127.0.0.1:9"), "head", "cannot be reached"),
    "port taken": (listen, "ports", "(ray) cannot be used"),
    "clock off": (lambda w: w.monkeypatch.setenv("HEAD_TIME", str(time.time() + 60)), "clock", "s off the head's"),
    "GPU missing": (lambda w: (w.path / "bin/nvidia-smi.gpus").write_text("1 2 3"), "gpus", "has 3 GPUs"),
    "other node count": (
        lambda w: w.monkeypatch.setenv("SLURM_JOB_NUM_NODES", "12"),
        "nodes",
        "12 nodes, the recipe 16",
    ),
    "nothing to replay": (lambda w: w.set("recipe.replay=old", "recipe.nodes=8"), "replay", "holds no trajectories"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_environment_is_named_with_its_remedy(world: World, name: str) -> None:
    break_it, check, message = BROKEN[name]
    break_it(world)
    began, used = time.monotonic(), time.process_time()
    status, found, printed = world.problems()
    assert time.process_time() - used < 5
    assert time.monotonic() - began < 30, "under 10 s where the machine is not shared"
    assert status == 2
    named = [p for p in found if p["check"] == check and message in p["message"]]
    assert named, found
    assert named[0]["remedy"]
    assert named[0]["fatal"]
    assert SECRET not in printed
    if taken := getattr(world, "taken", None):
        taken.close()


def test_every_check_has_a_broken_environment() -> None:
    covered = {check for _, check, _ in BROKEN.values()}
    assert covered >= {
        "packages", "credentials", "model", "served model", "tasks", "sandbox", "quota", "scratch", "fabric", "head",
        "ports", "clock", "gpus", "nodes", "replay",
    }  # fmt: skip


def test_all_problems_are_said_at_once(world: World) -> None:
    names = ["package too old", "key empty", "no tokenizer", "no served model", "no tasks", "disk too small",
             "no fabric prefix", "GPU missing", "clock off", "quota below in-flight"]  # fmt: skip
    for name in names:
        BROKEN[name][0](world)
    _, found, _ = world.problems()
    assert {p["check"] for p in found} >= {BROKEN[name][1] for name in names}


def test_a_check_that_hangs_is_a_problem_and_keeps_nobody(world: World, tmp_path: Path) -> None:
    """A model folder on a dead file system: a pipe that nobody writes to, in a process of its own."""
    config = world.path / "bf16" / "config.json"
    config.unlink()
    os.mkfifo(config)
    words = ["train", "--plugin", "glm52", "--preflight", *(w for s in world.sets for w in ("--set", s))]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rlcore", *words], capture_output=True, text=True, timeout=60, cwd=world.path
    )
    assert done.returncode == 2
    assert "[model]: the check did not end within 5 s" in done.stdout
    assert time.monotonic() - began < 30


def test_versions_are_compared_as_numbers() -> None:
    assert preflight._parts("0.10.2+cu1") == (0, 10, 2) > preflight._parts("0.9")
    assert preflight._parts("2.13.0rc1")[:2] == (2, 13)
