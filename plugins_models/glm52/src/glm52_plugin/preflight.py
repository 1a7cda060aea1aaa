"""Everything that would make the run fail, found before a GPU is touched: all at once, each check bounded in time.

A check never raises and never prints a credential; it says what is wrong, where, and what to do.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rlcore.types import Problem

from glm52_plugin.cluster import cluster_of
from glm52_plugin.credentials import credentials
from glm52_plugin.model import GLM52
from glm52_plugin.planning import layout_of

if TYPE_CHECKING:
    from rlcore.config import RunConfig

__all__ = ["SECONDS", "problems_of"]

SECONDS = 5.0
"""Longest time of one check; all run side by side."""

PACKAGES = {
    "ray": ("2.40", "3"),
    "megatron-core": ("0.19", "0.20"),
    "sglang": ("0.5", "0.6"),
    "transformers": ("5", "6"),
    "torch": ("2.6", "3"),
}
"""What the driver's machine must have, from (included) and below (excluded) which version."""


def problems_of(own: Any, run: RunConfig) -> list[Problem]:
    """Run every check; a check that takes too long is a problem of its own."""
    checks: Mapping[str, Callable[[], Iterable[Problem]]] = {
        "packages": lambda: _packages(own),
        "credentials": lambda: _credentials(run),
        "model": lambda: _model(own, run),
        "served model": lambda: () if own.replay else _served(run),
        "scratch": lambda: _scratch(own, run),
        "sandbox": lambda: _sandbox(run),
        "quota": lambda: _quota(own, run),
        "replay": lambda: _replay(own),
        "fabric": lambda: _fabric(run),
        "ports": lambda: _ports(own, run),
        "clock": _clock,
        "gpus": lambda: _gpus(own),
    }
    results: dict[str, list[Problem]] = {}

    def run_check(name: str, check: Callable[[], Iterable[Problem]]) -> None:
        try:
            results[name] = list(check())
        except OSError as error:
            results[name] = [Problem(name, f"cannot look: {error}", "make it readable for this user")]

    # daemons: one that hangs on a dead file system must not keep the process
    threads = {name: Thread(target=run_check, args=(name, check), daemon=True) for name, check in checks.items()}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + SECONDS
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            message = f"the check did not end within {SECONDS:.0f} s"
            results[name] = [Problem(name, message, "is a file system or network hanging? see its path in --dry-run")]
    return [problem for name in checks for problem in results[name]]


def _packages(own: Any) -> Iterator[Problem]:
    for name, (least, below) in PACKAGES.items():
        if name == "sglang" and own.replay:
            continue
        wanted = f"pip install '{name}>={least},<{below}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Problem("packages", f"{name} is not installed", wanted)
            continue
        if not _parts(least) <= _parts(version) < _parts(below):
            yield Problem("packages", f"{name} is {version}; from {least} and below {below} is needed", wanted)


def _credentials(run: RunConfig) -> Iterator[Problem]:
    for place in dict.fromkeys(credentials(run)):
        if "/" not in place and "." not in place:
            if not os.environ.get(place, "").strip():
                remedy = f"export {place}=…, or name a file of mode 600 in the configuration"
                yield Problem("credentials", f"environment variable {place} is not set or empty", remedy)
            continue
        path = Path(place).expanduser()
        try:
            mode = path.stat().st_mode
            empty = not path.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            what = type(error).__name__ if isinstance(error, UnicodeDecodeError) else error.strerror
            yield Problem("credentials", f"{path}: cannot be read: {what}", f"write the key into {path}, mode 600")
            continue
        if stat.S_IMODE(mode) & 0o077:
            yield Problem(
                "credentials", f"{path} has mode {stat.S_IMODE(mode):o}: others may read it", f"chmod 600 {path}"
            )
        if empty:
            yield Problem("credentials", f"{path} is empty", f"write the key into {path}")


# --- checkpoints


def _model(own: Any, run: RunConfig) -> Iterator[Problem]:
    shapes: dict[str, tuple[int, ...]] = {}
    yield from _checkpoint("model", run.model.path or "", shapes)
    if not shapes:
        return
    hidden, vocabulary = GLM52["hidden_size"], GLM52["vocab_size"]
    wanted = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        f"model.layers.{own.layers - 1}.input_layernorm.weight": (hidden,),
        "model.layers.0.self_attn.q_a_proj.weight": (GLM52["q_lora_rank"], hidden),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (
            GLM52["kv_lora_rank"] + GLM52["qk_rope_head_dim"], hidden),
        "model.layers.0.mlp.gate_proj.weight": (GLM52["intermediate_size"], hidden),
    }  # fmt: skip
    for name, shape in wanted.items():
        if name not in shapes:
            yield Problem("model", f"{run.model.path}: no tensor {name}", "download the whole checkpoint again")
        elif shapes[name] != shape:
            message = f"{run.model.path}: {name} is {list(shapes[name])}, GLM-5.2 has {list(shape)}"
            yield Problem("model", message, "set recipe.model to a checkpoint of GLM-5.2")


def _served(run: RunConfig) -> Iterator[Problem]:
    path = getattr(run.engine.options, "model_path", None)
    if path is not None:
        yield from _checkpoint("served model", path, {})


def _checkpoint(check: str, path: str, shapes: dict[str, tuple[int, ...]]) -> Iterator[Problem]:
    """Whether a folder holds a whole checkpoint of this architecture; fills ``shapes`` from the shards' headers."""
    folder = Path(path)
    again = f"download it again into {folder}, or set recipe.{'model' if check == 'model' else 'served_model'}"
    if not folder.is_dir():
        yield Problem(check, f"{folder} is not there", again)
        return
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        yield Problem(check, f"{folder}/config.json: {error}", again)
        return
    for key in ("model_type", "hidden_size", "num_hidden_layers", "n_routed_experts", "vocab_size", "kv_lora_rank"):
        if config.get(key) != GLM52[key]:
            yield Problem(
                check, f"{folder}/config.json: {key} is {config.get(key)!r}, GLM-5.2 has {GLM52[key]!r}", again
            )
            return
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        yield Problem(check, f"{folder} has no tokenizer.json", again)
    index = folder / "model.safetensors.index.json"
    try:
        names = json.loads(index.read_text("utf-8"))["weight_map"]
        shards = sorted(set(names.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        yield Problem(check, f"{index}: {type(error).__name__}: {error}", again)
        return
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        yield Problem(check, f"{folder}: {len(missing)} of {len(shards)} shards are missing: {_few(missing)}", again)
        return
    found: set[str] = set()
    for shard in shards:
        try:
            header = _header(folder / shard)
        except (OSError, ValueError) as error:
            yield Problem(check, f"{folder}/{shard}: {error}", again)
            return
        found |= header.keys()
        shapes |= header
    lost = sorted(set(names) - found)
    if lost:
        yield Problem(check, f"{folder}: {len(lost)} tensors of the index are in no shard: {_few(lost)}", again)


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name from a safetensors header. Raises ``ValueError`` if the file is cut off or no such file."""
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError("is empty or cut off")
        (length,) = struct.unpack("<Q", start)
        size = path.stat().st_size
        if length > min(size - 8, 100_000_000):
            raise ValueError("is no safetensors file, or cut off in its header")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(f"has {size} bytes, its header says {8 + length + end}: cut off while it was copied")
    return {name: tuple(tensor["shape"]) for name, tensor in header.items()}


# --- this machine


def _scratch(own: Any, run: RunConfig) -> Iterator[Problem]:
    if getattr(run.trainer.options, "optimizer_state", "gpu") != "stream":
        return
    from glm52_plugin.planning import stages_of

    scratch = Path(run.trainer.options.scratch)
    there = next((folder for folder in (scratch, *scratch.parents) if folder.exists()), Path("/"))
    remedy = "set recipe.scratch to a folder on a local NVMe of every training node"
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield Problem("scratch", f"{scratch} cannot be written", remedy)
        return
    needed = max(stage.optimizer for stage in stages_of(own, run)) * min(own.gpus_per_node, layout_of(own, run).gpus)
    free = shutil.disk_usage(there).free
    if free < needed:
        message = (
            f"{scratch}: {free / 1e9:,.0f} GB (1e9 bytes) are free, {needed / 1e9:,.0f} GB of optimizer state are streamed "
            "there by one node"
        )
        yield Problem("scratch", message, remedy)


def _replay(own: Any) -> Iterator[Problem]:
    if own.replay and not list(Path(own.replay).glob("trajectories/*.parquet")):
        message = f"{own.replay}: holds no trajectories/*.parquet"
        yield Problem("replay", message, "set recipe.replay to the directory of a run that recorded attempts")


def _ports(own: Any, run: RunConfig) -> Iterator[Problem]:
    import socket

    for what, port in cluster_of(own, run).ports.items():
        if what == "ray" and os.environ.get("RAY_ADDRESS"):
            continue  # a launcher started Ray already
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError as error:
                message = f"port {port} ({what}) cannot be used: {error.strerror}"
                yield Problem("ports", message, f"end what listens there (ss -ltnp 'sport = :{port}')")


def _gpus(own: Any) -> Iterator[Problem]:
    if shutil.which("nvidia-smi") is None:
        yield Problem("gpus", "nvidia-smi is not there", f"run the preflight on a node with {own.gpus_per_node} GPUs")
    else:
        line = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)
            found = [row for row in done.stdout.splitlines() if row.strip()]
        except (OSError, subprocess.TimeoutExpired):
            found = []
        if len(found) != own.gpus_per_node:
            message = f"this node has {len(found)} GPUs, recipe.gpus_per_node is {own.gpus_per_node}"
            yield Problem("gpus", message, "look at nvidia-smi, or set recipe.gpus_per_node")
    given = os.environ.get("SLURM_JOB_NUM_NODES")
    if given is not None and given != str(own.all_nodes):
        yield Problem("nodes", f"the job has {given} nodes, the recipe {own.all_nodes}", f"set recipe.nodes={given}")


# --- the network


def _fabric(run: RunConfig) -> Iterator[Problem]:
    from rlcore_launchers.node import addresses

    prefix = getattr(run.launcher and run.launcher.options, "fabric_prefix", None)
    prefix = prefix or os.environ.get("FABRIC_PREFIX", "").strip()
    if not prefix:
        message = "FABRIC_PREFIX is not set: which of a node's addresses the others reach is not guessed"
        yield Problem("fabric", message, f"export FABRIC_PREFIX=…, the start of one of {_few(addresses()) or 'none'}")
    elif not any(address.startswith(prefix) for address in addresses()):
        message = f"no address of this node begins with FABRIC_PREFIX {prefix!r}; there are {_few(addresses())}"
        yield Problem("fabric", message, "set it to the start of the address on the fabric between nodes")
    if not os.environ.get("FABRIC_IFNAME", "").strip():
        message = "FABRIC_IFNAME is not set: NCCL and gloo would choose an interface by themselves"
        yield Problem("fabric", message, "export FABRIC_IFNAME=…, the interface that has that address", fatal=False)
    head = os.environ.get("HEAD_ADDRESS", "").strip()
    if head:
        yield from _head(head)


def _head(head: str) -> Iterator[Problem]:
    import socket

    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
    except (OSError, ValueError) as error:
        yield Problem("head", f"the head {head} cannot be reached: {error}", "start it, or open the port on the fabric")


def _sandbox(run: RunConfig) -> Iterator[Problem]:
    """Whether the provider answers at all: any answer of HTTP counts, also a refusal."""
    if run.sandbox is None or run.sandbox.name.rpartition(":")[2] != "daytona":
        return
    url = run.sandbox.options.api_url or os.environ.get("DAYTONA_API_URL") or "https://app.daytona.io/api"
    try:
        urlopen(Request(url, method="HEAD"), timeout=3.0).close()
    except HTTPError as error:
        error.close()
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        yield Problem("sandbox", f"{url} does not answer: {reason}", "open the way to it, or set sandbox.api_url")


def _quota(own: Any, run: RunConfig) -> Iterator[Problem]:
    each = getattr(run.taskset.options, "min_cpus", 0) or 1
    needed = run.rollout.in_flight * each
    if own.sandbox_cpu_quota is not None and own.sandbox_cpu_quota < needed:
        message = f"the provider gives {own.sandbox_cpu_quota} CPUs, {run.rollout.in_flight} attempts of {each:g} need {needed:g}"
        yield Problem("quota", message, "ask for more, or set rollout.in_flight and rollout.tasks_per_step lower")


def _clock() -> Iterator[Problem]:
    """Whether the head's clock, where a launcher told its time, is this one's: Ray and TLS need seconds."""
    told = os.environ.get("HEAD_TIME", "").strip()
    if not told:
        return
    try:
        skew = time.time() - float(told)
    except ValueError:
        yield Problem("clock", f"HEAD_TIME is {told!r}, no time", "let the launcher set it")
        return
    if not -10 < skew < 300:  # the head's time is as old as the launch
        yield Problem("clock", f"this clock is {skew:+.0f} s off the head's", "start chrony or ntpd on this node")


def _parts(version: str) -> tuple[int, ...]:
    parts: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = "".join(char for char in part if char.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def _few(names: Iterable[str], limit: int = 3) -> str:
    shown = list(names)
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")
