"""The options of ``trainer.name = "megatron"``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import PluginError

__all__ = ["MegatronTrainer"]


class MegatronTrainer:
    """Megatron-Core on Ray. This class types the options; rlcore-megatron is the trainer."""

    class Config(BaseModel):
        """Parallel layout, memory, optimizer."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        tp: int = Field(2, ge=1, description="tensor parallel, always with sequence parallel (Megatron's MoE needs it)")
        pp: int = Field(4, ge=1, description="pipeline parallel")
        split: tuple[int, ...] = Field(
            (18, 20, 20, 20), description="decoder layers of each pipeline stage; must start where an indexer is"
        )
        cp: int = Field(4, ge=1, description="context parallel: a row is cut into 2 × cp parts")
        ep: int = Field(8, ge=1, description="expert parallel")
        etp: int = Field(1, ge=1, description="tensor parallel of experts")
        micro_tokens: int = Field(8192, ge=1, description="tokens of a micro-batch per GPU; rows are packed up to it")
        logprob_chunk: int = Field(16384, ge=1, description="positions whose logits exist at one time")
        recompute: Literal["full", "none"] = Field("full", description="full: a layer keeps its input only")
        fp32_gradients: bool = Field(True, description="accumulate and reduce gradients in float32")
        optimizer_state: Literal["gpu", "stream"] = Field(
            "stream", description="stream: master weights and moments lie on node-local disk between steps"
        )
        scratch: str = Field("/scratch/rlcore", description="node-local folder of streamed state; never shared storage")
        lr: float = Field(1e-6, gt=0, allow_inf_nan=False, description="learning rate, constant")
        weight_decay: float = Field(0.1, ge=0, allow_inf_nan=False, description="decoupled weight decay of matrices")
        betas: tuple[float, float] = Field((0.9, 0.98), description="decay of Adam's two moments")
        eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
        max_grad_norm: float = Field(1.0, gt=0, description="the global gradient norm is clipped to this")
        train_router_bias: bool = Field(False, description="update the router's selection bias (rate 0 otherwise)")
        aux_loss: float = Field(0.0, ge=0, description="weight of the load-balancing loss")
        train_mtp: bool = Field(False, description="train the prediction layer and publish it")
        bucket_gib: float = Field(2.0, gt=0, description="size of a bucket of the weight broadcast, GiB (2^30 bytes)")
        dump_batches: bool = Field(False, description="keep every batch for replay without engines")

    def __init__(self, config: Config) -> None:
        raise PluginError("trainer 'megatron' is not installed: pip install rlcore-megatron")
