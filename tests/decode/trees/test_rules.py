"""What runs on a GPU, run on the CPU: the same tokens as the rules that go row by row, and the checks of trees."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from decode import Sampling, Tree
from decode.devices.transfer import Upload, copy_packed
from decode.trees import accept
from decode.trees.accept import draw_all, follow, pack, unpack
from decode.trees.noise import ACCEPTANCE, DRAFT, TEXT, key, row_keys
from decode.trees.walk import walk
from tests.decode.test_tree import random_tree

VOCABULARY = 6
TEXTS = {4: [1, 2, 3], 7: [5], 8: [2, 2]}


@pytest.mark.parametrize("settings", [{"top_p": 0.8}, {"top_k": 3}, {"temperature": 0.0}])
def test_nodes_drawn_at_once_are_those_of_the_walk(settings: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        tree = random_tree(random.Random(seed))
        torch.manual_seed(seed)
        logits = 2 * torch.randn(3, tree.width, VOCABULARY, dtype=torch.float64)
        sampling = Sampling(**{"temperature": 0.9, "seed": seed, **settings})
        keys = row_keys(seed, [*TEXTS], [*map(len, TEXTS.values())], tree.width, TEXT)
        expected = unpack(pack(tree, *walk(tree, logits, sampling, TEXTS)))
        for most in (1, 1 << 27):  # row by row, and all rows at once
            monkeypatch.setattr("decode.trees.accept.MOST", most)
            found = unpack(pack(tree, *follow(tree, draw_all(tree, logits, sampling, keys))))
            # Of siblings with the same token the walk takes the first, the other the one that leads further.
            assert found.tokens[0][: len(expected.tokens[0])] == expected.tokens[0]
            if not has_twins(tree):
                assert (found.path, found.bonus) == (expected.path, expected.bonus)


def test_noise_is_made_for_each_level_of_a_tree_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a level share it: a vocabulary of it for each node would cost as much as the pass."""
    made, make = list[int](), accept.make_exponential
    monkeypatch.setattr(accept, "make_exponential", lambda keys, tokens: made.append(len(keys)) or make(keys, tokens))
    tree = Tree(torch.ones(2, 40, dtype=torch.long), torch.tensor([[-1, *[0] * 39]] * 2), torch.tensor([40, 40]), 1)
    keys = row_keys(1, [4, 7], [3, 1], 40, TEXT)
    draw_all(tree, torch.randn(2, 40, VOCABULARY), Sampling(temperature=1.0, seed=1), keys)
    assert made == [2 * 2]  # rows and levels


def has_twins(tree: Tree) -> bool:
    for row, size in enumerate(tree.sizes.tolist()):
        pairs = [*zip(tree.parents[row, :size].tolist(), tree.tokens[row, :size].tolist(), strict=True)]
        if len({*pairs}) < len(pairs):
            return True
    return False


@pytest.mark.parametrize("stream", [TEXT, ACCEPTANCE, DRAFT])
def test_keys_of_rows_are_those_of_their_numbers(stream: int) -> None:
    made = row_keys((1 << 62) - 5, [3, 1 << 40], [0, 99], 4, stream)
    for row, (request_id, position) in enumerate([(3, 0), (1 << 40, 99)]):
        for level in range(4):
            arguments = (position + level,) if stream == TEXT else (position, stream, level)
            assert int(made[row, level]) == key((1 << 62) - 5, request_id, *arguments)


def test_a_valid_tree_stays_as_it_is_but_for_its_root() -> None:
    for seed in range(50):
        tree = random_tree(random.Random(seed))
        checked = tree.mend(torch.tensor([1, 2, 3]), 12, VOCABULARY)
        assert checked.wrong is not None and not checked.wrong.any()
        assert checked.tokens[:, 0].tolist() == [1, 2, 3]
        assert torch.equal(checked.tokens[:, 1:], tree.tokens[:, 1:])
        assert torch.equal(checked.parents, tree.parents) and torch.equal(checked.sizes, tree.sizes)


def test_a_wrong_tree_is_mended_and_marked_in_its_row_only() -> None:
    caught = 0
    for seed in range(300):
        choose = random.Random(seed)
        tree = random_tree(choose)
        spoilt = Tree(tree.tokens.clone(), tree.parents.clone(), tree.sizes.clone(), tree.height)
        row, node = choose.randrange(3), choose.randrange(tree.width)
        what = choose.choice([spoilt.tokens, spoilt.parents])
        what[row, node] = choose.choice([-7, -1, VOCABULARY, 40])
        if choose.random() < 0.2:
            spoilt.sizes[row] = choose.choice([0, 99])
        wrong = not is_valid(spoilt, row)
        checked = spoilt.mend(tree.tokens[:, 0], 12, VOCABULARY)
        assert checked.wrong is not None
        assert checked.wrong.tolist() == [each == row and wrong for each in range(3)], seed
        caught += wrong
        # Nothing of it can index out of range.
        mended = Tree(checked.tokens, checked.parents, checked.sizes, tree.width)
        mended.check(12, VOCABULARY)
    assert caught > 100


def is_valid(tree: Tree, row: int) -> bool:
    """What the CPU's check says of a row, whose root is replaced."""
    tokens = tree.tokens.clone()
    tokens[:, 0] = 0
    one = slice(row, row + 1)
    try:
        Tree(tokens[one], tree.parents[one], tree.sizes[one], tree.height).check(12, VOCABULARY)
    except ValueError:
        return False
    return True


def test_a_tree_deeper_than_its_height_is_marked() -> None:
    """In the rows that are. Noise is laid out by depth, so no depth may exceed the height."""
    for depth, height in product(range(1, 9), range(1, 9)):
        chain = Tree.chain([[0] * (depth + 1), [0, 1]])
        tree = Tree(chain.tokens, chain.parents, chain.sizes, height)
        checked = tree.mend(torch.tensor([0, 0]), 12, VOCABULARY)
        assert checked.wrong is not None and checked.wrong.tolist() == [depth > height, False]
        assert int(checked.depth.max()) <= height


@pytest.mark.parametrize("parents", [[-1, 0, 0], [-1, -1, 1]])
def test_a_chain_that_is_none_is_marked(parents: list[int]) -> None:
    tree = Tree(torch.tensor([[1, 2, 3]]), torch.tensor([parents]), torch.tensor([3]), 2, is_chain=True)
    checked = tree.mend(torch.tensor([1]), 9, VOCABULARY)
    assert checked.wrong is not None and checked.wrong.tolist() == [True]


def test_packed_tensors_arrive_unchanged() -> None:
    tensors = {
        "numbers": torch.tensor([[1, -2], [3, 1 << 60]]),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, dtype=torch.long),
        "columns": torch.arange(6.0, dtype=torch.float64).view(2, 3).T,
        "small": torch.tensor(7, dtype=torch.int32),
    }
    arrived = copy_packed(tensors, torch.device("meta"))  # a device without memory shows shapes
    assert {name: (each.shape, each.dtype) for name, each in arrived.items()} == {
        name: (each.shape, each.dtype) for name, each in tensors.items()
    }
    upload = Upload(torch.device("cpu"))
    upload.add(tensors)
    assert all(upload[name] is tensor for name, tensor in tensors.items()) and "other" not in upload
    with pytest.raises(KeyError):
        upload["other"]
