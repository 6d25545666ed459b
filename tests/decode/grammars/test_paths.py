"""What a grammar allows after each path of a draft tree, and trees without what it forbids."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from transformers import AutoTokenizer

from decode import Tree, default_model
from decode.grammars.grammar import MakeMatcher, make_matchers
from decode.grammars.matcher import Constraint, Matcher, constrain, forbid
from tests.support.drafting import tree_of_rows
from tests.support.grammars import GRAMMARS, PERSON, SumMatcher, TableMatcher, encode, make_matcher, make_target, replay

SMALL = 12  # tokens of a vocabulary
# 3 or 4, then 5 or the end; 7 leads to a state that allows nothing.
TABLE = {0: {3: 1, 4: 1, 7: 2}, 1: {5: 1, 9: TableMatcher.DONE}}
SHORT = {"enum": ["green", "grey"]}


def constrain_table() -> Constraint:
    return Constraint(lambda: TableMatcher(TABLE, SMALL), SMALL)


def list_tokens(constraint: Constraint, *path: int) -> list[int] | None:
    """The allowed tokens after a path; None after a complete document."""
    allowed = constraint.find_allowed(path)
    return None if allowed is None else allowed.nonzero()[:, 0].tolist()


def check_path(constraint: Constraint, make: MakeMatcher, answer: Sequence[int], path: Sequence[int]) -> None:
    """A path has the allowed and forced tokens of a fresh matcher after all tokens, whichever is asked first."""
    matcher, path = replay(make, [*answer, *path]), tuple(path)
    if len(path) % 2:
        forced = constraint.find_forced(path)
    allowed = constraint.find_allowed(path)
    if not len(path) % 2:
        forced = constraint.find_forced(path)
    if matcher.is_complete:
        assert allowed is None and [*forced] == []
        return
    expected = matcher.find_allowed()
    assert allowed is not None and torch.equal(allowed, expected)
    assert [*forced] == [*(matcher.find_forced() if expected.any() else ())]


def draw_paths(choose: random.Random, make: MakeMatcher, answer: Sequence[int], vocabulary: int) -> list[list[int]]:
    """The paths of a random tree's nodes, all of them allowed."""
    paths = [[*()]]
    for _ in range(choose.randint(1, 6)):
        before = choose.choice(paths)
        matcher = replay(make, [*answer, *before])
        if not matcher.is_complete and (tokens := matcher.find_allowed().nonzero()[:, 0].tolist()):
            paths.append([*before, choose.choice(tokens)])
    return paths


@pytest.mark.parametrize("kind", [*GRAMMARS, "short", "sum"])
def test_a_matcher_that_moves_is_a_fresh_one_on_each_path(kind: str) -> None:
    """In a thousand random trees of all kinds together, after tokens that stay on the last path and that leave it."""
    choose, ends, trees = random.Random(kind), 0, 0
    if kind == "sum":
        vocabulary = 40
        make: MakeMatcher = lambda request_id: SumMatcher(vocabulary, size=9)  # noqa: E731
    else:
        vocabulary = make_target().vocabulary
        make = make_matcher(SHORT if kind == "short" else GRAMMARS[kind])
    while trees < 200:
        constraint, answer = Constraint(lambda: make(0), vocabulary), list[int]()
        while trees < 200 and not replay(make, answer).is_complete:
            trees += 1
            paths = draw_paths(choose, make, answer, vocabulary)
            for path in choose.choices(paths, k=len(paths)):
                check_path(constraint, make, answer, path)
                ends += replay(make, [*answer, *path]).is_complete
            taken = choose.choice(paths)
            for token in taken:
                constraint.take(token)
            answer += taken
            assert constraint.taken == len(answer)
            assert constraint.is_complete == replay(make, answer).is_complete
        check_path(constraint, make, answer, ())
    assert ends > 5 or kind in ("schema", "regex")  # few of their documents are complete at random


def test_a_forbidden_token_is_refused() -> None:
    constraint = constrain_table()
    constraint.take(3)
    constraint.find_allowed((5, 9))
    with pytest.raises(ValueError, match="the grammar forbids token 4"):
        constraint.take(4)


def test_nothing_follows_a_complete_document() -> None:
    constraint = constrain_table()
    assert list_tokens(constraint, 3, 9) is None and constraint.find_forced((3, 9)) == ()
    assert list_tokens(constraint, 3) == [5, 9] and not constraint.is_complete
    for token in (3, 5, 9):
        constraint.take(token)
    assert constraint.is_complete and list_tokens(constraint) is None and constraint.find_error() is None


def test_a_dead_end_has_no_token_and_an_error() -> None:
    constraint = constrain_table()
    assert list_tokens(constraint, 7) == [] and not constraint.find_forced((7,))
    assert constraint.find_error() is None  # the answer itself goes on
    constraint.take(7)
    assert not constraint.is_complete and "allows no token here" in str(constraint.find_error())


def test_a_matcher_makes_few_moves() -> None:
    """Each node costs a copy and a token, and accepted tokens cost nothing more."""
    moves: list[str] = []

    class Counted(TableMatcher):
        def accept(self, token: int) -> bool:
            moves.append("accept")
            return super().accept(token)

        def fork(self) -> Matcher:
            moves.append("fork")
            return super().fork()

    constraint = Constraint(lambda: Counted(TABLE, SMALL), SMALL)
    for path in ((3,), (3, 5), (3, 5, 5), (3, 5, 9), (3, 5, 5)):  # the last one is known
        constraint.find_allowed(path)
    assert moves == ["fork", "accept"] * 4
    for token in (3, 5, 9):
        constraint.take(token)
    assert len(moves) == 8


# Draft trees.


def draw_tree(choose: random.Random, rows: int) -> Tree:
    drawn = []
    for _ in range(rows):
        size = choose.randint(1, 12)
        parents = [-1, *(choose.randrange(node) for node in range(1, size))]
        drawn.append(([choose.choice([3, 4, 5, 5, 7, 9, 9, 11]) for _ in range(size)], parents))
    return tree_of_rows(drawn)


def list_nodes(tree: Tree, row: int) -> Iterator[tuple[list[int], int]]:
    """The tokens on the path to each node, root excluded, and its parent."""
    paths: dict[int, list[int]] = {0: []}
    for node in range(int(tree.sizes[row])):
        if node:
            paths[node] = [*paths[int(tree.parents[row, node])], int(tree.tokens[row, node])]
        yield paths[node], int(tree.parents[row, node])


def fits(path: Sequence[int]) -> bool:
    """Whether the table allows all of it."""
    matcher = TableMatcher(TABLE, SMALL)
    return all(map(matcher.accept, path))


def test_forbidden_nodes_and_their_descendants_are_gone() -> None:
    """The others keep their order and parents. Rows without a grammar keep all."""
    choose, cut = random.Random(3), 0
    for _ in range(300):
        tree = draw_tree(choose, 3)
        constraints = [constrain_table() if choose.random() < 0.7 else None for _ in range(3)]
        kept, allowed = constrain(tree, constraints)
        kept.check(12, SMALL, tree.tokens[:, 0].tolist())
        assert allowed.keys() == {row for row, constraint in enumerate(constraints) if constraint}
        for row, constraint in enumerate(constraints):
            expected = [path for path, _ in list_nodes(tree, row) if constraint is None or fits(path)]
            assert [path for path, _ in list_nodes(kept, row)] == expected
            cut += int(tree.sizes[row]) - len(expected)
            if constraint is not None:
                assert allowed[row].shape == (len(expected), SMALL)
                for path, mask in zip(expected, allowed[row], strict=True):
                    assert list_tokens(constrain_table(), *path) in (None, mask.nonzero()[:, 0].tolist())
    assert cut > 500


def test_a_complete_document_is_the_last_node() -> None:
    tree = tree_of_rows([([0, 3, 9, 5, 9, 3], [-1, 0, 1, 2, 1, 4])])
    kept, allowed = constrain(tree, [constrain_table()])
    assert kept.tokens.tolist() == [[0, 3, 9, 9]] and kept.parents.tolist() == [[-1, 0, 1, 1]]
    assert bool(allowed[0][2:].all())  # what is chosen there is not used


def test_a_tree_without_grammars_is_the_same_object() -> None:
    tree = draw_tree(random.Random(1), 2)
    assert constrain(tree, [None, None]) == (tree, {}) and constrain(tree, [None, None])[0] is tree
    logits = torch.randn(2, 3, SMALL)
    assert forbid(logits, {}) is logits


def test_a_sampled_chain_keeps_its_first_forbidden_token_alone() -> None:
    q = torch.full((2, 5, SMALL), 1 / SMALL)
    tree = Tree.chain_of(torch.tensor([[0, 3, 4, 5, 9], [0, 3, 9, 5, 9]]), torch.tensor([5, 5]), q=q)
    kept, allowed = constrain(tree, [constrain_table(), constrain_table()])
    kept.check(5, SMALL, [0, 0])
    assert kept.is_chain and kept.tokens.tolist() == [[0, 3, 4], [0, 3, 9]] and kept.sizes.tolist() == [3, 3]
    assert kept.q is not None and kept.q.shape == (2, 3, SMALL)
    assert not allowed[0][1, 4] and bool(allowed[0][2].all())


def test_forbidden_tokens_get_minus_infinity_in_their_rows_alone() -> None:
    logits = torch.randn(2, 3, SMALL)
    before, mask = logits.clone(), torch.rand(2, SMALL) < 0.5
    found = forbid(logits, {1: mask})
    assert torch.equal(logits, before)
    assert torch.equal(found[0], logits[0]) and torch.equal(found[1, 2], logits[1, 2])
    assert torch.equal(found[1, :2], torch.where(mask, logits[1, :2], -torch.inf))


def test_the_names_of_fields_are_forced_as_the_tokenizer_cuts_them() -> None:
    make = make_matcher(PERSON)
    constraint = Constraint(lambda: make(0), make_target().vocabulary)
    begin = encode('{"name": "hello", "co')
    assert constraint.find_forced(()) == encode('{"name": "')[:-1]  # a quote may begin a longer token
    assert constraint.find_forced(tuple(begin)) == encode('lour": "')


@pytest.mark.slow
def test_a_branch_does_not_change_its_sibling() -> None:
    """llguidance 1.9.1 allows another key after `["` if `{"` was taken there before and taken back by `rollback`."""
    tokenizer = AutoTokenizer.from_pretrained(default_model().parent)
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    make = make_matchers(schema, tokenizer, len(tokenizer), frozenset({2}))
    text, object_, array = (
        [*map(tokenizer.convert_tokens_to_ids, each)]
        for each in (('{"', "name", '":', '\u0120"', '",', '\u0120"', '":'), ['\u0120{"'], ['\u0120["'])
    )
    constraint = Constraint(lambda: make(0), len(tokenizer))
    for token in text:
        constraint.take(token)
    for path in (object_, array, array, object_):
        found, right = constraint.find_allowed(tuple(path)), replay(make, text + path).find_allowed()
        assert found is not None and torch.equal(found, right)
