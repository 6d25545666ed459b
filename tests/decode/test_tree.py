"""Draft trees, the KV cache that they are verified in, and the greedy walk down them."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from decode import Sampling, Target, Tree
from decode.kv_cache import KVCache
from decode.prefill import read_texts
from decode.trees.accept import accept, pack, unpack
from decode.trees.walk import walk
from proposers.search import Draft
from tests.support.drafting import tree_of_paths, tree_of_rows
from tests.support.models import tiny


def random_tree(choose: random.Random, batch: int = 3) -> Tree:
    rows = []
    for _ in range(batch):
        size = choose.randint(1, 12)
        tokens = [choose.randrange(6) for _ in range(size)]
        rows.append((tokens, [-1, *(choose.randrange(node) for node in range(1, size))]))
    return tree_of_rows(rows)


def climb(tree: Tree, row: int, node: int) -> list[int]:
    """The path from the root to a node, by following parents."""
    path = [node]
    while tree.parents[row, path[0]] >= 0:
        path.insert(0, int(tree.parents[row, path[0]]))
    return path


def test_ancestors_and_depth_follow_the_parents() -> None:
    for seed in range(50):
        tree = random_tree(random.Random(seed))
        for row in range(3):
            for node in range(tree.width):
                path = climb(tree, row, node)
                assert tree.ancestors[row, node].nonzero()[:, 0].tolist() == path
                assert tree.depth[row, node] == len(path) - 1 <= tree.height


def assert_same_shape(tree: Tree, other: Tree) -> None:
    for name in ("parents", "sizes", "ancestors", "depth"):
        assert torch.equal(getattr(tree, name), getattr(other, name)), name


def test_a_chain_is_a_tree() -> None:
    chain = Tree.chain([[5, 6, 7], [8]])
    assert chain.parents.tolist() == [[-1, 0, 1], [-1, -1, -1]]
    # The other one computes what `Tree.chain` knows beforehand.
    assert_same_shape(chain, Tree(chain.tokens, chain.parents, chain.sizes, chain.height))


def test_the_best_candidates_are_a_tree_and_so_are_the_first_of_them() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 14]])
    parents = torch.tensor([[-1, -1, 0, 0, 2]])
    scores = torch.tensor([[-0.5, -2.0, -0.5, -1.0, -0.5]])  # ties along a path: a child must not lose its parent
    make = partial(Draft.of, torch.tensor([7]), tokens, parents, scores, levels=3, right=None, has_figures=True)
    draft = make(nodes=9)
    tree = draft.largest.first(4)
    assert tree.tokens.tolist() == [[7, 10, 12, 14]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2]]
    tree.check(4, 20)
    assert draft.largest.first(9).tokens.tolist() == [[7, 10, 12, 14, 13, 11]]
    for nodes in range(1, 10):
        first, same = draft.largest.first(nodes), make(nodes=nodes).largest
        assert first.height == same.height and first.tensors().keys() == same.tensors().keys()
        assert all(torch.equal(tensor, same.tensors()[name]) for name, tensor in first.tensors().items())


def list_nodes(tree: Tree, row: int) -> list[tuple[list[int], float]]:
    """A row's nodes in order: the tokens of the path to each, and its score."""
    assert tree.scores is not None
    return [
        (tree.tokens[row, climb(tree, row, node)].tolist(), float(tree.scores[row, node]))
        for node in range(int(tree.sizes[row]))
    ]


def test_cut_keeps_each_rows_nodes_up_to_a_depth() -> None:
    smaller = 0
    for seed in range(60):
        torch.manual_seed(seed)
        choose = random.Random(seed)
        tree = random_tree(choose)
        tree = replace(tree, scores=torch.rand(tree.tokens.shape))
        depths = [choose.randrange(5) for _ in range(3)]
        cut = tree.cut(depths)
        cut.check(tree.width, 6)
        for row, deepest in enumerate(depths):
            kept = [node for node in list_nodes(tree, row) if len(node[0]) - 1 <= deepest]
            assert list_nodes(cut, row) == kept
            assert (cut.parents[row, len(kept) :] == -1).all()
        assert cut.width == int(cut.sizes.max()) and int(cut.depth.max()) <= cut.height <= max(depths)
        smaller += cut.width < tree.width
    assert smaller > 20


def test_a_cut_chain_is_a_chain() -> None:
    chain = Tree.chain([[5, 6, 7, 8], [9, 3], [4, 4, 4, 4]])
    chain = replace(chain, q=torch.rand(3, 4, 6))
    cut, expected = chain.cut([2, 5, 0]), Tree.chain([[5, 6, 7], [9, 3], [4]])
    assert cut.is_chain and cut.height == 2
    assert_same_shape(cut, expected)
    assert torch.equal(cut.tokens[cut.real], expected.tokens[expected.real])
    assert cut.q is not None and chain.q is not None
    assert torch.equal(cut.q[cut.real], chain.q[:, : cut.width][cut.real])


CHAIN, BUSH = Tree.chain([[1, 2, 3, 4, 5]]), tree_of_paths([1], [[[2, 3], [4]]])


def make_pair(tokens: list[int], parents: list[int], size: int = 2) -> Tree:
    return Tree(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([size]), height=2)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (make_pair([1, 2], [-1, 1]), "parent before itself"),
        (make_pair([1, 2], [0, 0]), "root and padding must have parent -1"),
        (make_pair([1, 2], [-1, -1]), "parent before itself"),
        (make_pair([1, 2], [-1, 0], size=1), "padding must have parent -1"),
        (make_pair([1, 9], [-1, 0]), "outside the vocabulary of 9"),
        (make_pair([1, -1], [-1, 0]), "outside the vocabulary"),
        (make_pair([1, 2], [-1, 0], size=0), "has its root and at most"),
        (Tree.chain([[1] * 6]), "budget of 5"),
        (Tree.chain([[1, 2], [1, 2]]), "for 1 rows, they are"),
        (replace(CHAIN, height=1), "deeper than its height of"),
        (replace(CHAIN, height=2), "deeper than its height of"),
        (replace(BUSH, is_chain=True), "must be a chain"),
        (replace(BUSH, q=torch.ones(1, 4, 9)), "must be a chain"),  # only chains are sampled
    ],
)
def test_invalid_trees_are_refused(tree: Tree, message: str) -> None:
    def check(tree: Tree) -> None:
        tree.check_shapes(1, 9)
        tree.check(budget=5, vocabulary=9)

    for valid in (CHAIN, BUSH):
        check(valid)
    with pytest.raises(ValueError, match=message):
        check(tree)


def test_the_greedy_walk_is_the_walk_at_temperature_zero() -> None:
    """Two implementations, which accept as many tokens as the longest path on which all are the target's."""
    for seed in range(200):
        torch.manual_seed(seed)
        tree = random_tree(random.Random(seed))
        logits = torch.randn(3, tree.width, 6, dtype=torch.float64)
        fast = accept(tree, logits, Sampling(), {})
        slow = unpack(pack(tree, *walk(tree, logits, Sampling(), {0: [0], 1: [0], 2: [0]})))
        assert fast.bonus == slow.bonus and fast.tokens == slow.tokens and fast.sizes == slow.sizes
        for row in range(3):
            chosen = logits[row].argmax(dim=1)
            paths = [climb(tree, row, node) for node in range(int(tree.sizes[row]))]
            right = [path for path in paths if torch.equal(tree.tokens[row, path[1:]], chosen[path[:-1]])]
            longest = tree.tokens[row, max(right, key=len)].tolist()
            assert fast.tokens[row] == longest


def keep(cache: KVCache, path: list[list[int]]) -> None:
    moves = cache.plan_moves(path)
    assert moves is not None
    cache.move(moves)
    cache.commit([*map(len, path)])


def test_layers_of_one_shape_share_tensors() -> None:
    """At most 8 of them, and a layer of another shape has tensors of its own. All are moved, grown and selected."""
    cache = KVCache(2, layer_count=11)
    heads = [3 if number in (5, 7) else 1 for number in range(11)]
    cache.reserve(0, 4, torch.device("cpu"))
    new = torch.arange(8.0).view(2, 1, 4, 1)
    for number, count in enumerate(heads):
        cache.update(new.expand(-1, count, -1, 2) + 100 * number, new.expand(-1, count, -1, 1) - number, number)
    assert [len(block.keys) for block in cache.blocks] == [8, 3, 1]
    keep(cache, [[0, 3], [0, 2]])
    cache.reserve(0, 400, torch.device("cpu"))
    assert [len(block.keys) for block in cache.blocks] == [8, 2, 1]  # what no layer took is freed
    cache.select([1])
    for number, (layer, count) in enumerate(zip(cache.layers, heads, strict=True)):
        assert layer.keys.shape == (1, count, cache.capacity, 2) and layer.values.shape == (1, count, cache.capacity, 1)
        for states, first in ((layer.keys, 100 * number), (layer.values, -number)):
            assert states[0, -1, :2, -1].tolist() == [4 + first, 6 + first]


def test_a_tree_may_be_verified_level_by_level() -> None:
    target = Target(tiny("gemma3_text"))
    whole, grown = target.open(2), target.open(2)
    for session in (whole, grown):
        read_texts(session, [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 5]])
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2]]).expand(2, 6)
    tree = Tree(torch.arange(20, 32).view(2, 6), parents, torch.tensor([6, 6]), height=2)
    expected = whole.verify(tree).logits
    parts = []
    for start, end in [(0, 1), (1, 3), (3, 6)]:
        part = Tree(tree.tokens[:, :end], tree.parents[:, :end], tree.sizes.clamp(max=end), height=2)
        parts.append(grown.verify(part, start=start).logits)
    assert torch.allclose(torch.cat(parts, dim=1), expected, atol=1e-10)
