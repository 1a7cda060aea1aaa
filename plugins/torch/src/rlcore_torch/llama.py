"""A fast forward and backward for the Llama family: every layer is one autograd function with a backward by hand.

Against a generic module it saves memory traffic, not arithmetic: attention over a token trie runs in blocks of queries,
each with exactly the keys that it can see, so its cost grows with the length of the rows and not with their number.
K positions, D hidden size, H query heads, V key heads, G = H / V, b queries and m keys of a block, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from rlcore_torch.layout import Block

__all__ = ["fits", "hidden_states"]

Tensor = torch.Tensor

_FAMILIES = ("llama", "mistral", "qwen2")


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the layers of a model have in common, and how the positions see each other."""

    heads: int
    key_heads: int
    head_size: int
    scale: float
    eps: float
    cos: Tensor
    sin: Tensor
    blocks: list[tuple[slice, Tensor, Tensor]]
    recompute: bool
    heed: Callable[[], None]


def fits(module: Any) -> bool:
    """Whether a module is a causal model of this family, with nothing in it that this forward does not do."""
    config, body = module.config, getattr(module, "model", None)
    if config.model_type not in _FAMILIES or getattr(config, "hidden_act", None) != "silu" or body is None:
        return False
    first = body.layers[0]
    others = (first.self_attn.o_proj, first.mlp.gate_proj, first.mlp.up_proj, first.mlp.down_proj)
    return all(type(part) is torch.nn.Linear and part.bias is None for part in others)


def hidden_states(
    module: Any,
    token_ids: Tensor,
    positions: Tensor,
    blocks: list[Block],
    recompute: bool,
    heed: Callable[[], None],
) -> Tensor:
    """``[K, D]`` hidden states behind the last norm, with gradient to the module's parameters.

    Args:
        module: what :func:`fits`.
        token_ids: ``[K]`` int64.
        positions: ``[K]`` int64.
        blocks: consecutive queries and what they see.
        recompute: compute activations again in the backward instead of keeping them.
        heed: called before every layer, forward and backward; may raise.
    """
    body = module.model
    attention = body.layers[0].self_attn
    table = body.embed_tokens.weight
    # a tied table has the head's dense gradient already: only the rows that were looked up are added to it
    hidden = F.embedding(token_ids, table, sparse=module.lm_head.weight is table)
    with torch.no_grad():
        cos, sin = body.rotary_emb(hidden, positions[None])
    half = cos.shape[-1] // 2
    shape = _Shape(
        heads=attention.q_proj.out_features // attention.head_dim,
        key_heads=attention.k_proj.out_features // attention.head_dim,
        head_size=attention.head_dim,
        scale=attention.scaling,
        eps=body.norm.variance_epsilon,
        cos=cos[0, :, None, :half].float(),
        sin=sin[0, :, None, :half].float(),
        blocks=[_on_device(block, hidden.device) for block in blocks],
        recompute=recompute,
        heed=heed,
    )
    for layer in body.layers:
        heed()
        attention, mlp = layer.self_attn, layer.mlp
        hidden = _Layer.apply(
            shape,
            hidden,
            layer.input_layernorm.weight,
            attention.q_proj.weight,
            attention.q_proj.bias,
            attention.k_proj.weight,
            attention.k_proj.bias,
            attention.v_proj.weight,
            attention.v_proj.bias,
            attention.o_proj.weight,
            layer.post_attention_layernorm.weight,
            mlp.gate_proj.weight,
            mlp.up_proj.weight,
            mlp.down_proj.weight,
        )
    return _Norm.apply(hidden, body.norm.weight, shape.eps)


def _on_device(block: Block, device: torch.device) -> tuple[slice, Tensor, Tensor]:
    """Queries, key numbers, and ``[b, m]`` float32 that is added to the scores."""
    visible = torch.from_numpy(block.visible)
    bias = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    return slice(block.start, block.stop), torch.from_numpy(block.keys).to(device), bias.to(device)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, inverse = _norm(x, eps)
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normed, inverse, weight = ctx.saved_tensors
        grad_x, grad_weight = _norm_backward(grad, normed, inverse, weight)
        return grad_x, grad_weight, None


class _Layer(torch.autograd.Function):
    """``x + attention(norm(x))``, then ``+ mlp(norm(·))``."""

    @staticmethod
    def forward(ctx: Any, shape: _Shape, x: Tensor, *weights: Tensor | None) -> Tensor:
        y, kept = _forward(shape, x, weights)
        ctx.shape = shape
        ctx.count = 0 if shape.recompute else len(kept)
        ctx.save_for_backward(x, *weights, *kept[: ctx.count])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.shape.heed()
        x, *rest = ctx.saved_tensors
        weights = rest[: len(rest) - ctx.count]
        kept = rest[len(weights) :] if ctx.count else _forward(ctx.shape, x, weights)[1]
        return (None, *_backward(ctx.shape, grad.contiguous(), weights, kept))


def _forward(shape: _Shape, x: Tensor, weights: Any) -> tuple[Tensor, list[Tensor]]:
    norm1, wq, bq, wk, bk, wv, bv, wo, norm2, wg, wu, wd = weights
    normed1, inverse1 = _norm(x, shape.eps)
    h = normed1 * norm1
    q = _rotate(F.linear(h, wq, bq).view(-1, shape.heads, shape.head_size), shape.cos, shape.sin)
    k = _rotate(F.linear(h, wk, bk).view(-1, shape.key_heads, shape.head_size), shape.cos, shape.sin)
    v = F.linear(h, wv, bv).view(-1, shape.key_heads, shape.head_size)
    attended, probabilities = _attend(shape, q, k, v)
    middle = torch.addmm(x, attended, wo.t())
    normed2, inverse2 = _norm(middle, shape.eps)
    h = normed2 * norm2
    gate, up = h @ wg.t(), h @ wu.t()
    silu = F.silu(gate)
    y = torch.addmm(middle, silu * up, wd.t())
    return y, [normed1, inverse1, q, k, v, attended, normed2, inverse2, gate, up, silu, *probabilities]


def _backward(shape: _Shape, grad: Tensor, weights: Any, kept: Any) -> list[Tensor | None]:
    norm1, wq, bq, wk, bk, wv, bv, wo, norm2, wg, wu, wd = weights
    normed1, inverse1, q, k, v, attended, normed2, inverse2, gate, up, silu, *probabilities = kept

    grad_inner = grad @ wd
    grad_wd = grad.t() @ (silu * up)
    grad_up = grad_inner * silu
    grad_gate = torch.ops.aten.silu_backward(grad_inner.mul_(up), gate)
    h = normed2 * norm2
    grad_wg, grad_wu = grad_gate.t() @ h, grad_up.t() @ h
    grad_h = torch.addmm(grad_gate @ wg, grad_up, wu)
    grad_middle, grad_norm2 = _norm_backward(grad_h, normed2, inverse2, norm2)
    grad_middle += grad

    grad_attended = grad_middle @ wo
    grad_wo = grad_middle.t() @ attended
    grad_q, grad_k, grad_v = _attend_backward(shape, grad_attended, q, k, v, probabilities)
    grad_q = _rotate(grad_q, shape.cos, -shape.sin).flatten(1)
    grad_k = _rotate(grad_k, shape.cos, -shape.sin).flatten(1)
    grad_v = grad_v.flatten(1)
    h = normed1 * norm1
    grad_wq, grad_wk, grad_wv = grad_q.t() @ h, grad_k.t() @ h, grad_v.t() @ h
    grad_h = torch.addmm(torch.addmm(grad_q @ wq, grad_k, wk), grad_v, wv)
    grad_x, grad_norm1 = _norm_backward(grad_h, normed1, inverse1, norm1)
    grad_x += grad_middle
    biases = [None if b is None else g.sum(0) for b, g in ((bq, grad_q), (bk, grad_k), (bv, grad_v))]
    return [
        grad_x, grad_norm1, grad_wq, biases[0], grad_wk, biases[1], grad_wv, biases[2], grad_wo,
        grad_norm2, grad_wg, grad_wu, grad_wd,
    ]  # fmt: skip


def _norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rows over their root mean square, and the inverse of that in float32."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse).to(x.dtype), inverse


def _norm_backward(grad: Tensor, normed: Tensor, inverse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of the weight."""
    wide, normed = grad.float(), normed.float()
    grad_weight = (wide * normed).sum(0).to(weight.dtype)
    wide = wide * weight.float()
    along = (wide * normed).mean(-1, keepdim=True)
    return wide.addcmul_(normed, along, value=-1).mul_(inverse).to(grad.dtype), grad_weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``[K, heads, d]`` whose halves are the pairs; the inverse with ``-sin``."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _attend(shape: _Shape, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    """``[K, H * d]``, and the probabilities ``[V, G * b, m]`` of each block. Scores are float32."""
    out = torch.empty_like(q)
    probabilities = []
    for queries, keys, bias in shape.blocks:
        scores = torch.bmm(_by_key_head(shape, q[queries]).float() * shape.scale, k[keys].permute(1, 2, 0).float())
        wide = scores.view(shape.key_heads, -1, *bias.shape)
        chances = torch.softmax(wide.add_(bias), -1).view_as(scores).to(q.dtype)
        out[queries] = _by_position(shape, torch.bmm(chances, v[keys].transpose(0, 1)))
        probabilities.append(chances)
    return out.flatten(1), probabilities


def _attend_backward(
    shape: _Shape, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, probabilities: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v``; what several blocks add to a key is summed in float32."""
    grad = grad.view_as(q)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = k.new_zeros(k.shape, dtype=torch.float32), v.new_zeros(v.shape, dtype=torch.float32)
    for (queries, keys, _), chances in zip(shape.blocks, probabilities, strict=True):
        grad_out = _by_key_head(shape, grad[queries])
        _add_to_keys(grad_v, queries, keys, torch.bmm(chances.transpose(1, 2), grad_out).transpose(0, 1))
        grad_chances = torch.bmm(grad_out, v[keys].permute(1, 2, 0))
        grad_scores = torch._softmax_backward_data(grad_chances, chances, -1, chances.dtype)
        grad_q[queries] = _by_position(shape, torch.bmm(grad_scores, k[keys].transpose(0, 1)).mul_(shape.scale))
        part = torch.bmm(grad_scores.transpose(1, 2), _by_key_head(shape, q[queries])).mul_(shape.scale)
        _add_to_keys(grad_k, queries, keys, part.transpose(0, 1))
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _add_to_keys(total: Tensor, queries: slice, keys: Tensor, part: Tensor) -> None:
    """Add ``[m, V, d]`` to float32 sums; the last keys of a block are its own positions."""
    before = len(keys) - (queries.stop - queries.start)
    total[queries] += part[before:]
    total.index_add_(0, keys[:before], part[:before].float())


def _by_key_head(shape: _Shape, x: Tensor) -> Tensor:
    """``[b, H, d]`` to ``[V, G * b, d]``: the queries of one key head together."""
    b = x.shape[0]
    return (
        x.view(b, shape.key_heads, -1, shape.head_size)
        .permute(1, 2, 0, 3)
        .reshape(shape.key_heads, -1, shape.head_size)
    )


def _by_position(shape: _Shape, x: Tensor) -> Tensor:
    """The inverse of :func:`_by_key_head`."""
    return (
        x.view(shape.key_heads, shape.heads // shape.key_heads, -1, shape.head_size).permute(2, 0, 1, 3).flatten(1, 2)
    )
