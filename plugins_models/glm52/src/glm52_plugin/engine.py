"""The options of ``engine.name = "sglang"``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import PluginError

__all__ = ["SglangEngines"]


class SglangEngines:
    """SGLang servers on their own nodes. This class types the options; rlcore-megatron starts them and sends weights."""

    class Config(BaseModel):
        """Layout, cache, speculative decoding."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        model_path: str | None = Field(None, description="checkpoint that is served at first; default: model.path")
        gpus: int = Field(4, ge=1, description="GPUs of one engine")
        ep: int = Field(4, ge=1, description="expert parallel")
        dp_attention: int = Field(
            4, ge=1, description="attention ranks with a whole cache of their own each; 1: tensor parallel attention"
        )
        deepep: Literal["off", "auto", "normal", "low_latency"] = Field("auto", description="all-to-all of experts")
        quantization: Literal["fp8", "none"] = Field("fp8", description="of weights; GLM-5.2 in bf16 needs 8 GPUs")
        kv_dtype: Literal["fp8_e4m3", "bf16"] = Field("fp8_e4m3", description="of the KV cache")
        page_size: int = Field(64, ge=1, description="tokens of a page of the cache")
        memory_fraction: float = Field(0.85, gt=0, lt=1, description="share of memory for weights and cache")
        buffers_gib: float = Field(
            17.05, ge=0, description="GiB (2^30 bytes) that are neither weights nor cache, for the planner"
        )
        max_running: int = Field(256, ge=1, description="requests that one engine decodes at the same time")
        speculative: tuple[int, int, int] | None = Field(
            (1, 1, 2), description="EAGLE with the model's own prediction layer: steps, top-k, draft tokens"
        )
        tool_parser: str = Field("glm47", description="parser of tool calls")
        reasoning_parser: str = Field("glm45", description="parser of thoughts")
        port: int = Field(30000, ge=1024, le=65535, description="HTTP port of every engine")
        dist_port: int = Field(25000, ge=1024, le=65535, description="port of an engine that spans nodes")
        dp_aware: bool = Field(
            True, description="keep a session on one attention rank; without it each turn finds another rank's cache"
        )
        pause: Literal["in_place", "retract", "abort"] = Field(
            "in_place", description="what running requests do during a weight update: in_place: wait where they are"
        )
        watchdog_seconds: float = Field(1200.0, gt=0, description="an engine that hangs for longer ends itself")

    def __init__(self, config: Config) -> None:
        raise PluginError("engine 'sglang' is not installed: pip install rlcore-megatron")
