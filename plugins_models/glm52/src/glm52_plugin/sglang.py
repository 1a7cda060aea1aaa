"""The engines' options as SGLang 0.5 names them on its command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from glm52_plugin.model import GLM52

__all__ = ["server_line"]


def server_line(
    model: str, context: int, options: Any, seed: int, *, layers: int, rank: int = 0, nodes: int = 1
) -> tuple[str, ...]:
    """The words of one node of an engine; addresses are shell references that the launcher fills in."""
    words = ["python3", "-m", "sglang.launch_server"]
    for name, value in _flags(model, context, options, seed):
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    if layers < GLM52["num_hidden_layers"]:
        words += [
            "--json-model-override-args",
            json.dumps({"num_hidden_layers": layers, "num_nextn_predict_layers": 0}),
        ]
    if nodes > 1:
        words += ["--nnodes", str(nodes), "--node-rank", str(rank)]
        words += ["--dist-init-addr", f"${{ENGINE_HEAD_IP}}:{options.dist_port}"]
    return tuple(words)


def _flags(model: str, context: int, options: Any, seed: int) -> Iterator[tuple[str, Any]]:
    yield "model-path", options.model_path or model
    yield "host", "${NODE_IP}"
    yield "port", options.port
    yield "tp-size", options.gpus
    yield "ep-size", options.ep
    if options.dp_attention > 1:
        # --dp-size with --enable-dp-attention is the older spelling, deprecated in 0.5.23
        yield "attn-dp-size", options.dp_attention
    if options.deepep != "off":
        yield "moe-a2a-backend", "deepep"
        yield "deepep-mode", options.deepep
    if options.quantization != "none":
        yield "quantization", options.quantization
    yield "kv-cache-dtype", options.kv_dtype
    yield "page-size", options.page_size
    yield "context-length", context
    yield "mem-fraction-static", options.memory_fraction
    yield "max-running-requests", options.max_running
    if options.speculative is not None:
        steps, topk, drafts = options.speculative
        yield "speculative-algorithm", "EAGLE"
        yield "speculative-num-steps", steps
        yield "speculative-eagle-topk", topk
        yield "speculative-num-draft-tokens", drafts
    yield "tool-call-parser", options.tool_parser
    yield "reasoning-parser", options.reasoning_parser
    yield "watchdog-timeout", options.watchdog_seconds
    yield "random-seed", seed
    yield "weight-version", 0
    yield "skip-server-warmup", True
    yield "enable-metrics", True
