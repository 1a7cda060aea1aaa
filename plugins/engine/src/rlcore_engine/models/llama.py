"""A small fast forward for the Llama family: fused projections, slots side by side, prompts packed by a token trie."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from rlcore.errors import ConfigError
from torch import Tensor

from rlcore_engine.models.base import Prefilled, check_weights, limit_context
from rlcore_engine.models.kv import Slots, Span
from rlcore_engine.models.linear import Linear
from rlcore_engine.models.prefixes import PrefixStore, common_prefix
from rlcore_engine.trie import TokenTrie, build_trie

if TYPE_CHECKING:
    import numpy as np

__all__ = ["LlamaSide", "read_safetensors", "unsupported"]

_FAMILY = ("llama", "qwen2")
_ROTARY = ("default", "linear", "llama3")

SHARED_TOKENS = 32
"""Siblings keep what they have in common once if it is at least so long: shorter ones are faster side by side."""


def unsupported(config: Any, folder: Path) -> str | None:
    """Why the fast forward cannot serve a model; ``None`` if it can."""
    if config.model_type not in _FAMILY:
        return f"model_type {config.model_type!r} is not one of {', '.join(_FAMILY)}"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r}"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "biases in attention output or MLP"
    if getattr(config, "use_sliding_window", False):
        return "sliding window attention"
    if getattr(config, "quantization_config", None):
        return "quantised weights"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROTARY:
        return f"rotary scaling {rope!r}"
    if not any(folder.glob("*.safetensors")):
        return "no safetensors files"
    return None


@dataclass(slots=True)
class _Layer:
    """Weights of a layer; what has the same input is one projection."""

    norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(slots=True)
class _Tree:
    """Prompts that continue the same known tokens, and a trie of the rest, whose nodes begin at ``first``."""

    known: Span | None
    rows: list[int]
    trie: TokenTrie
    first: int

    @property
    def start(self) -> int:
        """Number of known tokens."""
        return 0 if self.known is None else len(self.known)


@dataclass(slots=True)
class _Segment:
    """Nodes ``[start, stop)`` of a tree as a part of one forward."""

    tree: _Tree
    start: int
    stop: int
    path: Tensor
    mask: Tensor | None


class LlamaSide:
    """See :class:`rlcore_engine.models.base.ModelSide`."""

    def __init__(
        self,
        folder: Path,
        config: Any,
        dtype: torch.dtype,
        *,
        context_length: int | None = None,
        prefix_tokens: int = 8192,
        chunk_tokens: int = 512,
    ) -> None:
        """Allocate and read the safetensors of ``folder``."""
        self.dtype = dtype
        self.vocab_size: int = config.vocab_size
        self.context_length = limit_context(config, context_length)
        self._chunk = chunk_tokens
        self._eps: float = config.rms_norm_eps
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._prefixes: PrefixStore[Span] = PrefixStore(prefix_tokens)
        self._allocate(config)
        self._rotate = _rotary_table(config, self.context_length)
        self._slots = Slots(
            config.num_hidden_layers, self._heads, self._kv_heads, self._head_dim, dtype, self.context_length
        )
        try:
            self.load(read_safetensors(folder))
        except ConfigError as error:
            raise ConfigError(f"model.path = {folder}: {error}") from error

    @property
    def active(self) -> int:
        """Slots in use."""
        return self._slots.active

    # --- weights ------------------------------------------------------------------------------------------------------

    def _allocate(self, config: Any) -> None:
        """Modules, and what of a checkpoint goes into each."""
        hidden, inner, dim = config.hidden_size, config.intermediate_size, self._head_dim
        q, kv = self._heads * dim, self._kv_heads * dim
        biased = config.model_type == "qwen2"

        def linear(inputs: int, *sizes: int, biased: bool = False) -> Linear:
            return Linear(sizes, inputs, self.dtype, biased=biased)

        self._embed, self._norm, self._head = (
            torch.empty(self.vocab_size, hidden, dtype=self.dtype),
            torch.empty(hidden),
            linear(hidden, self.vocab_size),
        )
        embed, head = "model.embed_tokens.weight", "lm_head.weight"
        self._tied = {head: embed} if config.tie_word_embeddings else {}
        self._plain = {embed: self._embed, "model.norm.weight": self._norm}
        self._linears: list[tuple[Linear, list[str]]] = [(self._head, [self._tied.get(head, head)])]
        self._shapes = {embed: (self.vocab_size, hidden), "model.norm.weight": (hidden,)}
        self._shapes.setdefault(self._linears[0][1][0], (self.vocab_size, hidden))
        self._layers = []
        for index in range(config.num_hidden_layers):
            layer = _Layer(
                norm=torch.empty(hidden),
                qkv=linear(hidden, q, kv, kv, biased=biased),
                out=linear(q, hidden),
                mlp_norm=torch.empty(hidden),
                gate_up=linear(hidden, inner, inner),
                down=linear(inner, hidden),
            )
            self._layers.append(layer)
            self._register(f"model.layers.{index}.", layer, hidden, inner, q, kv)

    def _register(self, at: str, layer: _Layer, hidden: int, inner: int, q: int, kv: int) -> None:
        self._plain[f"{at}input_layernorm.weight"] = layer.norm
        self._plain[f"{at}post_attention_layernorm.weight"] = layer.mlp_norm
        attention = {f"{at}self_attn.{name}_proj": size for name, size in (("q", q), ("k", kv), ("v", kv))}
        self._shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            **{f"{name}.weight": (size, hidden) for name, size in attention.items()},
            f"{at}self_attn.o_proj.weight": (hidden, q),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
        if layer.qkv.bias is not None:
            for (name, size), rows in zip(attention.items(), layer.qkv.bias.split([q, kv, kv]), strict=True):
                self._shapes[f"{name}.bias"] = (size,)
                self._plain[f"{name}.bias"] = rows
        self._linears += [
            (layer.qkv, [f"{name}.weight" for name in attention]),
            (layer.out, [f"{at}self_attn.o_proj.weight"]),
            (layer.gate_up, [f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight"]),
            (layer.down, [f"{at}mlp.down_proj.weight"]),
        ]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight by its checkpoint name."""
        return self._shapes

    def named_weights(self) -> Mapping[str, Tensor]:
        """The weights as they serve, by checkpoint name."""
        parts = {
            name: part for linear, names in self._linears for name, part in zip(names, linear.parts(), strict=True)
        }
        return {name: self._plain[name] if name in self._plain else parts[name] for name in self._shapes}

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights, or raise before the first is touched."""
        found = check_weights(self._shapes, self._tied, weights)
        for name, target in self._plain.items():
            target.copy_(found[name])
        for linear, names in self._linears:
            linear.load([found[name] for name in names])

    # --- the forward --------------------------------------------------------------------------------------------------

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """In the dtype of the projections. What lies between them stays in float32, as under a trainer's autocast."""
        return F.rms_norm(hidden, hidden.shape[-1:], weight, self._eps).to(self.dtype)

    def _rope(self, heads: Tensor, table: Tensor) -> Tensor:
        """Rotate ``[n, heads, D]`` by rows ``[n, 1, 2 D]`` of the table (cosines, signed sines)."""
        cosine, sine = table.chunk(2, -1)
        return torch.addcmul(heads * cosine, heads.roll(self._head_dim // 2, -1), sine)

    def _project(self, layer: _Layer, hidden: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[n, H, D]``, keys and values ``[n, K, D]``."""
        normed = self._normed(hidden, layer.norm)
        heads = layer.qkv(normed).view(len(hidden), -1, self._head_dim)
        rotated = self._rope(heads[:, : self._heads + self._kv_heads].float(), table).to(self.dtype)
        return rotated[:, : self._heads], rotated[:, self._heads :], heads[:, self._heads + self._kv_heads :]

    def _rest(self, layer: _Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + layer.out(attended)
        normed = self._normed(hidden, layer.mlp_norm)
        gate, up = layer.gate_up(normed).chunk(2, -1)
        return hidden + layer.down(F.silu(gate) * up)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._normed(hidden, self._norm)).float()

    def decode(self, token_ids: Sequence[int]) -> Tensor:
        """One token for every active slot: ``[active, V]`` float32."""
        step, positions = self._slots.begin()
        table = self._rotate[positions]
        hidden = self._embed[torch.tensor(token_ids)].float()
        for index, layer in enumerate(self._layers):
            queries, keys, values = self._project(layer, hidden, table)
            hidden = self._rest(layer, hidden, self._slots.attend(step, index, queries, keys, values))
        self._slots.commit(token_ids)
        return self._logits(hidden)

    # --- prefill ------------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Generator[None, None, Prefilled]:
        """Compute every distinct token once, in chunks; see :class:`~rlcore_engine.models.base.ModelSide`."""
        trees = self._plant(prompts)
        nodes = sum(len(tree.trie) for tree in trees)
        shape = (len(self._layers), self._kv_heads, nodes, self._head_dim)
        keys, values = torch.empty(shape, dtype=self.dtype), torch.empty(shape, dtype=self.dtype)
        last = [int(tree.first + tree.trie.row_nodes[n][-1]) for tree in trees for n in range(len(tree.rows))]
        wanted = torch.tensor(sorted(set(last)))
        hidden = torch.empty(len(wanted), self._embed.shape[1])
        done = 0
        for segments in self._chunks(trees):
            if done:
                yield
            states = self._forward(segments, keys, values)
            begin = segments[0].tree.first + segments[0].start
            mine = (wanted >= begin) & (wanted < begin + len(states))
            hidden[mine] = states[wanted[mine] - begin]
            done += len(states)
        logits = self._logits(hidden)
        place = {node: index for index, node in enumerate(wanted.tolist())}
        order = [row for tree in trees for row in tree.rows]
        by_row = dict(zip(order, (place[node] for node in last), strict=True))
        cached = self._settle(prompts, trees, Span(keys, values))
        return Prefilled(logits[[by_row[row] for row in range(len(prompts))]], cached)

    def _plant(self, prompts: Sequence[Sequence[int]]) -> list[_Tree]:
        """One tree for each set of known tokens that prompts continue."""
        sources: list[tuple[list[int], int | Span]] = [
            (row.tokens, slot) for slot, row in enumerate(self._slots.rows) if row.current
        ]
        sources += [(list(tokens), kept) for tokens, kept in self._prefixes.entries()]
        groups: dict[tuple[int, int], list[int]] = {}
        for row, prompt in enumerate(prompts):
            head = list(prompt[:-1])
            known, source = max(
                ((common_prefix(tokens, head), -index) for index, (tokens, _) in enumerate(sources)), default=(0, 0)
            )
            groups.setdefault((-source if known else -1, known), []).append(row)
        trees, first = [], 0
        for (source, length), rows in groups.items():
            known = self._known(*sources[source], length) if length else None
            trie = build_trie([list(prompts[row][length:]) for row in rows])
            trees.append(_Tree(known, rows, trie, first))
            first += len(trie)
        return trees

    def _known(self, tokens: Sequence[int], kept: int | Span, length: int) -> Span:
        if isinstance(kept, int):
            return self._slots.span(kept, length)
        self._prefixes.touch(tokens)
        return kept.cut(length)

    def _chunks(self, trees: list[_Tree]) -> Iterable[list[_Segment]]:
        """Segments of all trees in order, at most ``chunk_tokens`` nodes together."""
        segments: list[_Segment] = []
        room = self._chunk
        for tree in trees:
            start = 0
            while start < len(tree.trie):
                stop = min(len(tree.trie), start + room)
                segments.append(_segment(tree, start, stop))
                room -= stop - start
                start = stop
                if not room:
                    yield segments
                    segments, room = [], self._chunk
        if segments:
            yield segments

    def _forward(self, segments: list[_Segment], keys: Tensor, values: Tensor) -> Tensor:
        """Hidden states ``[n, hidden]`` of the segments' nodes; writes their keys and values."""
        tokens = torch.cat([torch.from_numpy(s.tree.trie.token_ids[s.start : s.stop]) for s in segments])
        places = [torch.from_numpy(s.tree.trie.positions[s.start : s.stop]) + s.tree.start for s in segments]
        table = self._rotate[torch.cat(places)]
        begin = segments[0].tree.first + segments[0].start
        hidden = self._embed[tokens].float()
        for index, layer in enumerate(self._layers):
            queries, new_keys, new_values = self._project(layer, hidden, table)
            keys[index, :, begin : begin + len(hidden)] = new_keys.transpose(0, 1)
            values[index, :, begin : begin + len(hidden)] = new_values.transpose(0, 1)
            parts = []
            for segment in segments:
                size = segment.stop - segment.start
                at = segment.tree.first + segment.start
                known = segment.tree.known
                seen = [
                    _seen(segment, store[index], before, at, size)
                    for store, before in (
                        (keys, None if known is None else known.keys[index]),
                        (values, None if known is None else known.values[index]),
                    )
                ]
                asked = queries[at - begin : at - begin + size].transpose(0, 1)[None]
                attended = F.scaled_dot_product_attention(
                    asked, seen[0], seen[1], attn_mask=segment.mask, is_causal=segment.mask is None, enable_gqa=True
                )
                parts.append(attended[0].transpose(0, 1).reshape(size, -1))
            hidden = self._rest(layer, hidden, torch.cat(parts) if len(parts) > 1 else parts[0])
        return hidden

    # --- slots --------------------------------------------------------------------------------------------------------

    def _settle(self, prompts: Sequence[Sequence[int]], trees: list[_Tree], fresh: Span) -> tuple[int, ...]:
        """Give each prompt a slot, in order; the number of tokens that were not computed for it."""
        spans: dict[int, tuple[Span | None, Span]] = {}
        cached = [0] * len(prompts)
        counted: set[int] = set()
        for tree in trees:
            shared = _common_spans(tree, fresh)
            for row, nodes in zip(tree.rows, tree.trie.row_nodes, strict=True):
                span, rest = shared.get(row), torch.from_numpy(nodes) + tree.first
                own = fresh.pick(rest if span is None else rest[len(span) - tree.start :])
                spans[row] = (span, own if span is not None or tree.known is None else tree.known.then(own))
                new = set(rest.tolist()) - counted
                counted |= new
                cached[row] = len(prompts[row]) - len(new)
        for row, prompt in enumerate(prompts):
            self._slots.append(prompt, *spans[row])
        return tuple(cached)

    def release(self, slot: int, *, keep: bool, poisoned: bool = False) -> None:
        """Free a slot; the last active one takes its place."""
        tokens = self._slots.rows[slot].tokens
        if keep and self._prefixes.worth(tokens):
            self._prefixes.put(tokens, self._slots.span(slot, len(tokens)))
        self._slots.release(slot, poisoned=poisoned)

    def forget(self) -> None:
        """Forget every kept prefix, and share nothing of the slots either."""
        self._prefixes.clear()
        self._slots.outdate()


def _common_spans(tree: _Tree, fresh: Span) -> dict[int, Span]:
    """What rows of a tree have in common, for those where it is worth it: equal prompts, and the beginning of the rest."""
    by_end: dict[int, list[int]] = {}
    for n, nodes in enumerate(tree.trie.row_nodes):
        by_end.setdefault(int(nodes[-1]), []).append(n)
    equal = [rows for rows in by_end.values() if len(rows) > 1]
    single = [rows[0] for rows in by_end.values() if len(rows) == 1]
    found: dict[int, Span] = {}
    for rows in [*equal, single]:
        paths = [tree.trie.row_nodes[n] for n in rows]
        depth = _common_depth(paths)
        if len(rows) < 2 or tree.start + depth < SHARED_TOKENS:
            continue
        span = fresh.pick(torch.from_numpy(paths[0][:depth]) + tree.first)
        span = span if tree.known is None else tree.known.then(span)
        found |= dict.fromkeys((tree.rows[n] for n in rows), span)
    return found


def _common_depth(paths: Sequence[Any]) -> int:
    """Number of leading nodes that all paths have."""
    depth = min(map(len, paths), default=0)
    for path in paths[1:]:
        different = (path[:depth] != paths[0][:depth]).nonzero()[0]
        depth = int(different[0]) if len(different) else depth
    return depth


def _segment(tree: _Tree, start: int, stop: int) -> _Segment:
    path: np.ndarray = tree.trie.path(start)
    chain = (
        tree.known is None
        and start == 0
        and bool((tree.trie.parents[:stop] == torch.arange(-1, stop - 1).numpy()).all())
    )
    if chain:
        return _Segment(tree, start, stop, torch.from_numpy(path), None)
    import numpy as np

    visible = torch.from_numpy(tree.trie.mask(start, stop, np.concatenate([path, np.arange(start, stop)])))
    known = torch.ones(stop - start, tree.start, dtype=torch.bool)
    return _Segment(tree, start, stop, torch.from_numpy(path), torch.cat([known, visible], 1))


def _seen(segment: _Segment, store: Tensor, known: Tensor | None, at: int, size: int) -> Tensor:
    """What a segment attends to in one layer, ``[1, kv heads, known + path + size, D]``."""
    parts = [] if known is None else [known]
    if len(segment.path):
        parts.append(store[:, segment.path + segment.tree.first])
    parts.append(store[:, at : at + size])
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0])[None]


def _rotary_table(config: Any, length: int) -> Tensor:
    """``[length, 1, 2 D]``: cosines, and sines with the sign that ``roll`` needs, as transformers computes them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    cosine, sine = rotary(torch.empty(1, dtype=torch.float32), torch.arange(length)[None])
    half = sine.shape[-1] // 2
    signed = torch.cat([-sine[0, :, :half], sine[0, :, half:]], -1)
    return torch.cat([cosine[0], signed], -1)[:, None]


def read_safetensors(folder: Path) -> Iterable[tuple[str, Tensor]]:
    """Every tensor of a folder's checkpoint; rotary tables of old ones are left out.

    Raises:
        ConfigError: names the file that cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():  # folders may hold a second copy of the weights in another layout
        try:
            paths = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError) as error:
            raise ConfigError(f"cannot read {index}: {error}") from error
    else:
        paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"no safetensors files in {folder}")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if not name.endswith("rotary_emb.inv_freq"):
                        yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
