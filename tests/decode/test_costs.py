"""The cost curve: how it is measured, kept in the user's cache and found again, and its batch sizes and contexts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from decode import Target, Tree, costs, generate
from decode.costs import SIZES, for_batch, measure_cost_curve, measured_batches
from decode.cuda.backend import CudaBackend
from decode.devices import user_cache
from decode.devices.cost_curve import CostCurve
from decode.session import Session
from proposers import MedusaProposer
from tests.support.drafting import make_head
from tests.support.models import tiny

Measured = list[tuple[int, int]]


def make_curve(rows: int, context: int) -> CostCurve:
    """A curve that tells the batch and the context: longer contexts slow all passes down alike."""
    return CostCurve(SIZES[:4], [context + rows * size for size in SIZES[:4]])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Curves are kept where only one test sees them."""
    monkeypatch.setattr(costs, "user_cache", lambda: tmp_path)
    return tmp_path / "curves"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """The batches and contexts that are measured, by a function that takes no time."""
    calls: Measured = []

    def measure(session: Session, context: int) -> CostCurve:
        calls.append((len(session.lengths), context))
        return make_curve(*calls[-1])

    monkeypatch.setattr(costs, "measure_cost_curve", measure)
    return calls


def long_target(**changes: Any) -> Target:
    return Target(tiny("llama", **{"max_position_embeddings": 8192, **changes}))


def test_cost_never_falls_and_is_linear_between_measures() -> None:
    cost = CostCurve([1, 2, 4, 8], [2.0, 3.0, 2.5, 8.0])
    assert [cost(nodes) for nodes in (1, 2, 3, 4, 6, 8, 12)] == [1.0, 1.25, 1.25, 1.25, 2.625, 4.0, 6.75]
    assert [CostCurve([1, 4, 8], [2.0, 1.0, 3.0])(nodes) for nodes in (2, 4, 6, 8)] == [1.0, 1.0, 2.0, 3.0]


def test_padding_costs_what_the_next_power_of_two_does() -> None:
    cost = CostCurve([1, 2, 4, 8], [2.0, 3.0, 4.0, 8.0])
    assert [cost.padded(nodes) for nodes in (1, 2, 3, 4, 5, 7, 8)] == [1.0, 1.5, 2.0, 2.0, 4.0, 4.0, 4.0]
    assert cost.padded(9) == cost.padded(16) == cost(16)
    longer = CostCurve([1, 4, 8], [6.0, 8.0, 10.0])
    twice, once = cost.padded.blend(longer.padded, 0.5).padded, cost.blend(longer, 0.5).padded
    assert [twice(nodes) for nodes in range(1, 9)] == [once(nodes) for nodes in range(1, 9)]
    assert cost.padded is cost.padded  # proposers start anew where they see another curve


def test_curves_blend_linearly_in_seconds() -> None:
    short, long = CostCurve([1, 2], [2.0, 4.0]), CostCurve([1, 2, 4], [6.0, 8.0, 10.0])
    middle = short.blend(long, 0.25)
    assert middle.sizes == (1, 2, 4) and middle.seconds == (3.0, 5.0, 8.5)  # the first goes on to 8 seconds at 4
    assert short.blend(long, 1.0).seconds == long.seconds
    assert short.blend(long, 2.0).seconds == (10.0, 12.0, 12.0)  # of 10, 12 and 12: at 4 the first one is as slow


@pytest.mark.parametrize(("rise", "largest"), [(0.01, 64), (0.5, 8)])
@pytest.mark.parametrize(("context", "expected"), [(256, 256), (600, 511)])
def test_cost_is_measured_on_warm_kernels(
    monkeypatch: pytest.MonkeyPatch, rise: float, largest: int, context: int, expected: int
) -> None:
    """Each size's first pass is slow, the very first one slowest. Sizes that are too expensive are timed once."""
    passes: list[int] = []

    def time(session: Session, tree: Tree) -> float:
        assert session.lengths == [expected] * 3
        passes.append(tree.width)
        warm = 1 + rise * (tree.width - 1)
        return 50.0 if len(passes) == 1 else warm if tree.width in passes[:-1] else warm + 10

    monkeypatch.setattr(costs, "time_pass", time)
    measured = measure_cost_curve(Target(tiny("llama", max_position_embeddings=512)).open(3), context)
    assert measured.sizes == tuple(size for size in costs.SIZES if size <= largest)
    assert measured.ratios == pytest.approx([1 + rise * (size - 1) for size in measured.sizes])
    assert max(passes) == largest and passes.count(1) == costs.WARM - 1 + costs.ROUNDS


def test_sizes_are_timed_as_far_as_nodes_get_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over n tokens of a mixture reads the experts of all of them, until it reads nearly all experts."""
    experts, chosen = 64, 8

    def time(session: Session, tree: Tree) -> float:
        return 1 + experts * (1 - (1 - chosen / experts) ** tree.width)

    monkeypatch.setattr(costs, "time_pass", time)
    curve = measure_cost_curve(Target(tiny("llama", max_position_embeddings=512)).open(1), 256)
    assert curve.sizes == costs.SIZES and curve(4) > 2.9 and curve(64) < 7.3


def test_expensive_nodes_are_told_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(user_cache, "_TOLD", set())
    for rise in (0.4, 0.9):
        monkeypatch.setattr(costs, "measure_cost_curve", lambda *_, rise=rise: CostCurve((1, 2), (1.0, 1.0 + rise)))
        target = Target(tiny("llama", num_hidden_layers=1 if rise == 0.4 else 2))
        target.warm_up()
        target.warm_up()
        told = capsys.readouterr().err
        assert told.count("a pass over 4 tokens takes 3.7 times as long as over one") == (rise == 0.9)


def test_a_batch_measures_few_curves(measured: Measured) -> None:
    assert [measured_batches(batch)[-1] for batch in (1, 2, 4, 5, 16, 17, 64, 65)] == [1, 4, 4, 16, 16, 64, 64, 256]
    Target(tiny("llama")).warm_up(8)
    assert measured == [(1, 256), (4, 256), (16, 256)]  # it has 256 positions
    measured.clear()
    target = long_target()
    target.warm_up(8)
    assert measured == [(rows, context) for rows in (1, 4, 16) for context in (256, 4096)]
    target.warm_up(64)
    assert measured[6:] == [(64, 256)]  # 64 rows of 4096 tokens would take too much memory
    assert target.cost_curve(64, 5000) is target.cost_curve(17)  # one context alone is measured


def test_contexts_between_the_measured_ones_have_seconds_between_theirs(measured: Measured) -> None:
    target = long_target()
    short, long = target.cost_curve(2), target.cost_curve(4, 4096)
    assert (short.seconds[0], long.seconds[0]) == (260, 4100) and measured == [(4, 256), (4, 4096)]
    assert target.cost_curve(3, 1) is target.cost_curve(3, 256) is short
    assert target.cost_curve(3, 4040) is long
    assert target.cost_curve(3, 8000).seconds == pytest.approx([8000 + 4 * size for size in SIZES[:4]])
    middle = target.cost_curve(4, 2241)
    assert middle is target.cost_curve(3, 2304) and middle is not target.cost_curve(4, 2305)
    assert middle.seconds == pytest.approx([2304 + 4 * size for size in SIZES[:4]])
    assert short(4) > middle(4) > long(4) > 1 and len(measured) == 2


def test_a_stream_asks_for_the_curve_of_its_longest_row(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """And measures nothing once it is warm."""
    target, asked = long_target(), []
    target.warm_up(2)
    measured.clear()
    find = target.cost_curve
    monkeypatch.setattr(target, "cost_curve", lambda *key: asked.append(key) or find(*key))
    monkeypatch.setattr(target, "learn_cost", lambda *_: None)
    proposer = MedusaProposer(make_head("medusa", target))
    generate(target, [[5, 9] * 128, [5, 9, 5]], proposer, max_new_tokens=20, stop_ids=())
    assert proposer.draft_budget.cost is find(*asked[-1])
    contexts = [context for rows, context in asked if rows == 2]
    assert contexts == sorted(contexts) and contexts[0] == 257 < contexts[-1] and measured == []


def test_later_starts_measure_nothing(measured: Measured, folder: Path) -> None:
    long_target().warm_up(4)
    assert len(measured) == 4 == len(list(folder.iterdir()))  # and nothing that was written aside
    again, other_weights = long_target(), Target(tiny("llama", seed=1, max_position_embeddings=8192))
    again.model.config._name_or_path = "another/folder"
    again.warm_up(4)
    other_weights.warm_up(4)
    assert len(measured) == 4 and again.cost_curve(4, 4096).seconds == make_curve(4, 4096).seconds


def test_steps_of_fixed_shape_are_measured_as_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And their curve is another than that of passes that are launched one by one."""
    sessions = list[Session]()

    def measure(session: Session, context: int) -> CostCurve:
        sessions.append(session)
        return make_curve(1, context)

    monkeypatch.setattr(costs, "measure_cost_curve", measure)
    monkeypatch.setattr(CudaBackend, "name", "a GPU")
    monkeypatch.setattr(CudaBackend, "make_pool", lambda _: None)
    for has_graphs in (False, True):
        target = Target(tiny("llama"))
        target.has_graphs, target.backend = has_graphs, CudaBackend(target.device)
        target.cost_curve()
    assert [session.steps is not None for session in sessions] == [False, True]


CHANGES: dict[str, dict[str, Any]] = {  # of the model, or a function that the curve's file depends on
    "layers": {"num_hidden_layers": 3},
    "activation": {"hidden_act": "relu"},
    "dtype": {"dtype": torch.float64},
    "attention": {"attn_implementation": "eager"},
    "packed layers": {"accelerate": "packed"},
    "threads": {"torch.get_num_threads": 99},
    "sources": {"decode.costs._digest_package": "edited"},
    "machine": {"decode.costs.environment": ("2.0", "another CPU")},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_cost_is_measured_anew(
    measured: Measured, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(accelerate: str = "off", **changes: Any) -> None:
        Target(tiny("llama", **{"dtype": torch.float32, **changes}), accelerate=accelerate).warm_up()

    (name, value), *_ = CHANGES[change].items()
    for _ in range(2):
        start()
        with monkeypatch.context() as patch:
            if "." in name:
                patch.setattr(name, lambda: value)
                start()
            else:
                start(**CHANGES[change])
    assert len(measured) == 2


SECONDS: list[Any] = [None, ["x"], [1.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], [1.0] * 99]
DAMAGED = [b"", b"\xff", b"[1.0, 2.0]", b"{}", *(json.dumps({"seconds": each}).encode() for each in SECONDS)]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_measured_again(measured: Measured, folder: Path, content: bytes) -> None:
    Target(tiny("llama")).warm_up()
    (file,) = folder.iterdir()
    file.write_bytes(content)
    for _ in range(2):
        target = Target(tiny("llama"))
        target.warm_up()
    assert len(measured) == 2 and target.cost_curve().seconds == make_curve(1, 256).seconds


def test_a_cache_that_cannot_be_written_is_no_error(
    measured: Measured, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file")  # a read-only folder would not stop root
    Target(tiny("llama")).warm_up()
    assert folder.read_text() == "a file"
    folder.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", Mock(side_effect=OSError("no space left")))
        Target(tiny("llama")).warm_up()
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(costs, "user_cache", Mock(side_effect=RuntimeError("no home folder")))
    Target(tiny("llama")).warm_up()
    assert len(measured) == 3


def test_batches_and_contexts_beyond_the_memory_use_smaller_ones(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def measure(session: Session, context: int) -> CostCurve:
        if len(session.lengths) * context > 1024:
            raise torch.OutOfMemoryError
        return make_curve(len(session.lengths), context)

    monkeypatch.setattr(costs, "measure_cost_curve", measure)
    target = long_target()
    target.warm_up(16)
    assert target.cost_curve(16, 4096).seconds == target.cost_curve(4, 4096).seconds == make_curve(4, 256).seconds
    assert target.cost_curve(1, 4096).seconds == make_curve(1, 256).seconds
    assert len(list(folder.iterdir())) == 2  # another start may have more memory
    monkeypatch.setattr(costs, "measure_cost_curve", lambda *_: measure(target.open(99), 99))
    with pytest.raises(torch.OutOfMemoryError):
        Target(tiny("gpt2")).warm_up()


def test_without_padding_the_curve_of_a_batch_is_that_of_its_tokens(measured: Measured) -> None:
    """Nothing more is measured, and rows may have any number of nodes."""
    target = Target(tiny("llama", dtype=torch.float32), accelerate="packed")
    assert target.passes_flat
    target.warm_up(8)
    assert measured == [(1, 256)]
    single, batch = target.cost_curve(), target.cost_curve(4)
    assert batch is target.cost_curve(4) and len(measured) == 1
    for tokens in (4, 5, 6, 8, 12, 16, 32):
        assert batch(tokens / 4) == pytest.approx(single(tokens) / single(4))


def test_rows_that_are_not_padded_cost_what_they_read_on_average(measured: Measured) -> None:
    """A single long text in the batch must not make the others look expensive."""
    target = Target(tiny("llama", dtype=torch.float32, max_position_embeddings=5000), accelerate="packed")
    texts = [[5] * length for length in (100, 100, 120, 1600)]
    assert target.passes_flat
    assert target.cost_after(texts) is target.cost_curve(4, 480)
    assert target.cost_after(texts).seconds[0] == pytest.approx((512 + 4) + 3 * 512)  # a slot takes 1 in `make_curve`
    padded = long_target()
    assert padded.cost_after(texts) is padded.cost_curve(4, 1600)


def test_each_row_of_a_batch_reads_its_own_keys_and_values() -> None:
    """As measured (milliseconds, after 256 and 4000 tokens): 4 rows of 1, 2 and 4 nodes took 62.7, 70.8 and 99.1."""
    short, long = 23.5, CostCurve((1, 2, 4, 8, 16, 32), (32.3, 34.4, 36.5, 44.7, 71.1, 134.2))
    batch = for_batch(long, 4, each_row=long.seconds[0] - short)
    assert batch.seconds[0] == pytest.approx(62.7, rel=0.02)
    for nodes, seconds in ((2, 70.8), (4, 99.1)):
        assert batch.seconds[0] * batch(nodes) == pytest.approx(seconds, rel=0.03)
