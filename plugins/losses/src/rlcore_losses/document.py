"""``docs/losses.md``, from the code: ``python -m rlcore_losses.document docs/losses.md``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rlcore_losses import plugin
from rlcore_losses.catalog import KINDS, Entry, describe
from rlcore_losses.peers import PEERS

__all__ = ["render"]

_HOOKS = {
    "correction": plugin.rlcore_register_corrections,
    "loss": plugin.rlcore_register_losses,
    "advantage": plugin.rlcore_register_advantages,
    "aggregation": plugin.rlcore_register_aggregations,
}

_INTRODUCTION = """\
# Losses

Generated from the code by `python -m rlcore_losses.document docs/losses.md`: a test fails when it is out of date.
`rlcore losses` lists all of this, `rlcore losses show NAME` prints one piece with a plot.

An objective has four parts, each chosen by name: an **advantage** estimator turns the rewards of groups into a number for
each attempt or turn, a **correction** weighs or rejects tokens for the gap between trainer and engine, a **loss** gives a
term for each token, and an **aggregation** gives each token its weight and the step its denominator:

    loss = Σ_t token_weight_t · weight_t · term_t  /  Σ denominators

The sums run over all micro-batches and ranks and are divided once, before clipping, so the result does not depend on how
a step is split. What must lie whole in one call is the *unit* of a correction or an aggregation; a split that breaks it is
refused.

Three families of log-probs exist: `rollout_logprobs` (the engine's, when it sampled), `old_logprobs` (the trainer's, before
the step), `logprobs` (the trainer's, now, with gradient). Everywhere `Δ_t = trainer_t − rollout_t`, and `exp` of a log-ratio
means `exp(min(·, 20))`: capped above, never from below. Tokens outside the mask are selected away, not multiplied by 0.

A floor of a weight (`low` above 0) over-weights every token whose ratio lies below it by `low / ratio`: 5 times at ratio 0.1
with `low = 0.5`, 50 times at 0.01. It is 0 by default, and a warning says so where it is set.
"""

_TITLES = {
    "correction": "Corrections",
    "loss": "Policy losses",
    "advantage": "Advantage estimators",
    "aggregation": "Aggregations",
}

_EVERY = {
    "correction": "",
    "loss": "Every loss also takes `kl_coef`, `kl`, `kl_to` and `entropy_coef`, listed once at the end of this section. "
    "With `d = logprobs − other`: k1 = d (its gradient has mean 0: a measure, not a penalty), k2 = d²/2, "
    "k3 = exp(min(−d, 20)) − 1 + d, unbiased = ratio to `old_logprobs` times k3. Sources: Schulman 2020; "
    'DeepSeek-V3.2 (2025). A loss with `ratio_to = "rollout"` looks at the engine itself, so no correction may weigh.',
    "advantage": "An attempt without a verdict has no entry and no influence. Rewards that differ by rounding are equal. "
    "Options that several share (`normalize`, `epsilon`, `keep_equal`, `min_survivors`, `salvage`) mean the same everywhere.",
    "aggregation": 'Tokens that a correction rejected are counted only with `denominator = "all"`.',
}

_SHARED = {"loss": ("kl_coef", "kl", "kl_to", "entropy_coef")}

_SALVAGE = """\
### Groups that lost members

Where the infrastructure loses attempts of a group, the survivors are kept (`min_survivors` says how many it takes). Let `g` be
the gradient of a task's expected reward. A member whose own reward is in its baseline, as with a group mean, pulls with
`(n − 1)/n · g` in expectation, and n members together with `(n − 1) g`; with a leave-one-out or constant baseline it is `g`
and `n g`. A task that loses attempts often is thus trained less than others: the naive way is biased between tasks. With
`salvage = "sum"` the survivors of k out of G are scaled by `(G − 1)/(k − 1)` (leave-one-out: `G/k`), with `salvage = "mean"`
(for `prompt_mean`) by `k (G − 1)/(G (k − 1))` (leave-one-out: 1), so that each kept group pulls as if it were whole. This is
exact if losing an attempt does not depend on its reward given the task, and if advantages are not divided by the group's own
deviation. Where failures are lost more often than successes, a bias remains that no weight can remove; so does that of groups
which fall below `min_survivors`. The tests simulate all three.
"""


def own_entries() -> list[Entry]:
    """Everything that this distribution offers."""
    found: list[Entry] = []
    for kind in KINDS:

        def register(name: str, target: str, kind: str = kind) -> None:
            module, _, attribute = target.partition(":")
            found.append(describe(kind, name, "rlcore-losses", getattr(import_module(module), attribute)))

        _HOOKS[kind](register)
    return found


def render() -> str:
    """The page as Markdown."""
    entries = own_entries()
    lines = [_INTRODUCTION]
    for kind in KINDS:
        inside = [entry for entry in entries if entry.kind == kind]
        lines += [f"## {_TITLES[kind]}", "", *([_EVERY[kind], ""] if _EVERY[kind] else [])]
        for entry in inside:
            lines += _entry(entry, hidden=_SHARED.get(kind, ()))
        if shared := _SHARED.get(kind):
            lines += ["### every loss", ""]
            lines += [*_options(option for option in inside[0].options if option.name in shared), ""]
        if kind == "advantage":
            lines += [_SALVAGE]
    lines += [*_peers()]
    return "\n".join(lines).rstrip() + "\n"


def _entry(entry: Entry, hidden: Iterable[str]) -> Iterable[str]:
    yield f"### {entry.name}"
    yield ""
    yield entry.summary
    yield ""
    for title, value in (
        ("Formula", entry.formula),
        ("Reads", entry.reads),
        ("Denominator", entry.denominator),
        ("Unit", entry.unit),
        ("Source", entry.source),
    ):
        if value:
            yield f"- {title}: {value}"
    yield ""
    options = list(_options(option for option in entry.options if option.name not in hidden))
    if options:
        yield from [*options, ""]


def _options(options: Iterable[Any]) -> Iterable[str]:
    rows = [f"| `{o.name}` | {_cell(o.default)} | {_cell(o.description)} |" for o in options]
    return ["| option | default | meaning |", "|---|---|---|", *rows] if rows else []


def _peers() -> Iterable[str]:
    yield "## Same name, different formula"
    yield ""
    yield "What other systems call it, what their code computes (ρ = π_trainer / π_rollout), and the setting here that computes "
    yield "the same; each row is checked on golden vectors (`tests/test_peer_semantics.py`)."
    yield ""
    yield "| called | systems | formula | setting |"
    yield "|---|---|---|---|"
    for peer in PEERS:
        settings = [
            f"`{part} = {_toml(section)}`"
            for part, section in (("correction", peer.correction), ("loss", peer.loss))
            if section is not None
        ]
        note = f" ({peer.note})" if peer.note else ""
        yield f"| {_cell(peer.called)} | {_cell(peer.systems)} | {_cell(peer.formula)} | {'; '.join(settings)}{note} |"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
