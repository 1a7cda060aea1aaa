"""Shared prefixes: the same log-probs and gradients as one row at a time, whatever lies together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcore_torch import layout, model
from rlcore_torch.model import CausalModel

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "mistral": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "gpt2": {},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 12},
    "mixtral": {"num_key_value_heads": 2},
}


@pytest.fixture
def load(model_folder):
    def of(family: str, *, gradient_checkpointing: bool = False) -> CausalModel:
        folder = model_folder(family, **FAMILIES.get(family, {}))
        return CausalModel(folder, torch.device("cpu"), gradient_checkpointing)

    return of


def rows_with_prefixes(seed: int = 0) -> tuple[list[list[int]], list[list[bool]]]:
    """Three prompts with a common beginning, four answers each, one row twice."""
    draw = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(3, 259, (n,), generator=draw).tolist()

    system = ids(20)
    rows = [prompt + ids(5 + n) for prompt in (system + ids(9) for _ in range(3)) for n in range(4)]
    rows.append(list(rows[0]))
    return rows, [[t >= 29 for t in range(len(row))] for row in rows]


def compute(of: CausalModel, arranged: layout.Layout, temperature: float = 0.7):
    of.module.zero_grad()
    logprobs = of.logprobs(arranged, temperature)[torch.from_numpy(arranged.scores)]
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(5))
    (logprobs * weights).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in of.module.named_parameters()}


def assert_same(found, expected) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=3e-5, rtol=0)
    whole = torch.stack([gradient.norm() for gradient in expected[1].values()]).norm()
    for name, gradient in expected[1].items():  # some are zero but for rounding
        assert (found[1][name] - gradient).norm() <= 2.4e-5 * gradient.norm() + 1e-6 * whole, name


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prefixes_change_neither_logprobs_nor_gradients(load, family):
    rows, masks = rows_with_prefixes()
    loaded = load(family)
    assert loaded.can_share
    plain, merged = layout.padded(rows, masks), layout.shared(rows, masks)
    assert merged.size < plain.size / 3
    assert_same(compute(loaded, merged), compute(loaded, plain))


def test_plain_logprobs_are_those_of_transformers(load):
    rows, masks = rows_with_prefixes()
    loaded = load("llama")
    arranged = layout.shared(rows, masks)
    found = loaded.logprobs(arranged, 0.7)[torch.from_numpy(arranged.scores)]
    expected = []
    for row, mask in zip(rows, masks, strict=True):
        logits = loaded.module(torch.tensor([row])).logits[0, :-1] / 0.7
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(row)[1:, None])[:, 0]
        expected.append(chosen[torch.tensor(mask[1:])])
    torch.testing.assert_close(found, torch.cat(expected), atol=3e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("variant", ["packed", "small blocks", "recompute"])
def test_the_fast_forward_is_the_same_in_every_arrangement(load, monkeypatch, family, variant):
    rows, masks = rows_with_prefixes()
    expected = compute(load(family), layout.padded(rows, masks))
    loaded = load(family, gradient_checkpointing=variant == "recompute")
    assert loaded.fast
    if variant == "small blocks":
        monkeypatch.setattr(model, "_BLOCK", 16)
    arranged = (layout.packed if variant == "packed" else layout.shared)(rows, masks)
    assert_same(compute(loaded, arranged), expected)


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2"])
def test_gradient_checkpointing_changes_no_gradient(load, family):
    rows, masks = rows_with_prefixes()
    arranged = layout.shared(rows, masks)
    assert_same(compute(load(family, gradient_checkpointing=True), arranged), compute(load(family), arranged))


def test_what_cannot_take_a_mask_is_found_out(load, caplog):
    loaded = load("mamba")
    assert not loaded.can_share
    assert "cannot share prefixes" in caplog.text


def test_a_sliding_window_bounds_the_rows_that_are_merged(model_folder):
    folder = model_folder("mistral", num_key_value_heads=2, sliding_window=16)
    loaded = CausalModel(folder, torch.device("cpu"), gradient_checkpointing=False)
    assert loaded.can_share
    assert loaded.reach == 16


def test_equal_answers_and_unneeded_tokens_are_not_computed():
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 4], [5, 6, 7, 8, 9]]
    masks = [[False, False, False, True, False], [False, False, False, True, True], [False, False, False, True, False]]
    merged = layout.shared(rows, masks)
    assert merged.token_ids.tolist() == [[5, 6, 7, 8]]
    assert len(merged.sources) == 2
    assert merged.targets[merged.scores].tolist() == [8, 8, 4, 8]


TOKENS = st.integers(3, 5)  # few, so that prefixes meet by chance


@st.composite
def some_rows(draw):
    rows = draw(st.lists(st.lists(TOKENS, min_size=2, max_size=12), min_size=1, max_size=8))
    masks = []
    for row in rows:
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(row) - 1, max_size=len(row) - 1))]
        mask[draw(st.integers(1, len(row) - 1))] = True
        masks.append(mask)
    return rows, masks


@pytest.fixture(scope="module")
def llama(model_folder):
    return CausalModel(model_folder("llama"), torch.device("cpu"), gradient_checkpointing=False)


@given(some_rows())
@settings(max_examples=40, deadline=None)
def test_any_rows_in_any_arrangement(llama, arranged):
    expected = compute(llama, layout.padded(*arranged))
    assert_same(compute(llama, layout.shared(*arranged)), expected)
    assert_same(compute(llama, layout.packed(*arranged)), expected)
