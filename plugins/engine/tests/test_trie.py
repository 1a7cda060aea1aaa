"""The trie is the packing of prefill and training: a wrong ancestor or position is a silently wrong gradient."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcore_engine.trie import build_trie

rows_of_few_tokens = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8)


def prefixes(rows):
    return {tuple(row[: t + 1]) for row in rows for t in range(len(row))}


@settings(max_examples=200, deadline=None)
@given(rows_of_few_tokens)
def test_one_node_per_distinct_prefix_and_rows_read_back(rows):
    trie = build_trie(rows)
    assert len(trie) == len(prefixes(rows))
    for row, nodes in zip(rows, trie.row_nodes, strict=True):
        assert trie.token_ids[nodes].tolist() == row
        assert trie.positions[nodes].tolist() == list(range(len(row)))
        assert trie.parents[nodes].tolist() == [-1, *nodes.tolist()][: len(row)]


@settings(max_examples=200, deadline=None)
@given(rows_of_few_tokens)
def test_mask_shows_each_node_its_ancestors_and_itself_alone(rows):
    trie = build_trie(rows)
    mask = trie.mask()
    for node in range(len(trie)):
        ancestors, at = set(), node
        while at >= 0:
            ancestors.add(at)
            at = trie.parents[at]
        assert set(mask[node].nonzero()[0]) == ancestors
        assert trie.path(node).tolist() == sorted(ancestors - {node})


@settings(max_examples=200, deadline=None)
@given(rows_of_few_tokens, st.data())
def test_a_run_of_nodes_sees_nothing_before_it_but_the_path_of_its_first(rows, data):
    trie = build_trie(rows)
    if not len(trie):
        return
    start = data.draw(st.integers(0, len(trie) - 1))
    stop = data.draw(st.integers(start + 1, len(trie)))
    keys = np.concatenate([trie.path(start), np.arange(start, stop)])
    whole = trie.mask()[start:stop]
    assert whole.sum() == whole[:, keys].sum()
    assert np.array_equal(trie.mask(start, stop, keys), whole[:, keys])


@given(rows_of_few_tokens, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_change_the_nodes(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    a, b = build_trie(rows), build_trie(shuffled)
    assert a.token_ids.tolist() == b.token_ids.tolist()
    assert a.parents.tolist() == b.parents.tolist()
