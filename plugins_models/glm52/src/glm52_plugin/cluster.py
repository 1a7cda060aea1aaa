"""Everything that would run, node by node. Pure: no folder, credential or environment variable is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlcore.types import Cluster, NodePlan

from glm52_plugin.credentials import credentials
from glm52_plugin.megatron import megatron_settings
from glm52_plugin.sglang import server_line

if TYPE_CHECKING:
    from rlcore.config import RunConfig

__all__ = ["RAY_PORT", "cluster_of"]

RAY_PORT = 6379
SLACK = 4096
"""Tokens of an engine's context above a row: the chat template's frame and drafted tokens."""


def cluster_of(own: Any, run: RunConfig) -> Cluster:
    """What :class:`rlcore.types.Cluster` describes; the nodes that train come first, node 0 is the head."""
    plans = list(_training(own, run))
    settings: dict[str, dict[str, Any]] = {}
    if hasattr(run.trainer.options, "split"):
        settings |= megatron_settings(own.layers, run.trainer.options)
    ports = {"ray": RAY_PORT}
    if not own.replay:
        plans += _serving(own, run)
        ports["engine"] = run.engine.options.port
    return Cluster(
        nodes=own.all_nodes,
        gpus_per_node=own.gpus_per_node,
        plans=tuple(plans),
        settings=settings,
        driver=("rlcore", "train", "--plugin", "glm52", "glm52"),
        ports=ports,
        pinned=("FABRIC_PREFIX", "FABRIC_IFNAME", "RLCORE_CACHE"),
    )


def _training(own: Any, run: RunConfig) -> Iterator[NodePlan]:
    start = ("ray", "start", "--node-ip-address=${NODE_IP}", f"--num-gpus={own.gpus_per_node}", "--disable-usage-stats")
    head = (*start[:2], "--head", f"--port={RAY_PORT}", *start[2:], "--block")
    worker = (*start[:2], f"--address=${{HEAD_IP}}:{RAY_PORT}", *start[2:], "--block")
    env = {**_env(own), **_secrets(run), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    driver = ("rlcore", "train", "--plugin", "glm52", "glm52")
    yield NodePlan((0,), "head, driver, trainer", env, (head, driver))
    if own.train_nodes > 1:
        rest = {name: value for name, value in env.items() if name not in _secrets(run)}
        yield NodePlan(tuple(range(1, own.train_nodes)), "trainer", rest, (worker,))


def _serving(own: Any, run: RunConfig) -> Iterator[NodePlan]:
    options = run.engine.options
    span = max(1, options.gpus // own.gpus_per_node)
    per_node = max(1, own.gpus_per_node // options.gpus)
    context = run.budget.tokens_per_session + SLACK
    join = ("ray", "start", f"--address=${{HEAD_IP}}:{RAY_PORT}", "--node-ip-address=${NODE_IP}",
            f"--num-gpus={own.gpus_per_node}", "--disable-usage-stats", "--block")  # fmt: skip
    env = {**_env(own), "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "1"}
    first = range(own.train_nodes, own.all_nodes)
    for rank in range(span):
        nodes = tuple(first[rank::span])
        if not nodes:
            continue
        line = server_line(
            run.model.path or "", context, options, run.run.seed, layers=own.layers, rank=rank, nodes=span
        )
        lines = tuple(
            (*line[: line.index("--port") + 1], str(options.port + number), *line[line.index("--port") + 2 :])
            for number in range(per_node)
        )
        role = "engine" if span == 1 else f"engine, part {rank + 1} of {span}"
        yield NodePlan(nodes, role, env, (join, *lines))


def _env(own: Any) -> dict[str, str]:
    """What every process gets: addresses on the fabric, caches of its own node, the flight recorder of NCCL."""
    local = own.scratch
    return {
        "FABRIC_PREFIX": "${FABRIC_PREFIX}",
        "NCCL_SOCKET_IFNAME": "${FABRIC_IFNAME}",
        "GLOO_SOCKET_IFNAME": "${FABRIC_IFNAME}",
        "TORCH_FR_BUFFER_SIZE": "20000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{local}/nccl/rank_",
        "TRITON_CACHE_DIR": f"{local}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{local}/inductor",
        "FLASHINFER_WORKSPACE_BASE": f"{local}/flashinfer",
        "RLCORE_CACHE": "${RLCORE_CACHE}",
    }


def _secrets(run: RunConfig) -> dict[str, str]:
    """References to the variables that hold credentials; files are named in the configuration and read at use."""
    return {name: f"${{{name}}}" for name in credentials(run) if "/" not in name and "." not in name}
