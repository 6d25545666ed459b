"""What the sources of a merged tree take: milliseconds a step and memory, by the length of the text.

    python -m docs.measure.profile_sources [--steps N] [--nodes N]

No model is needed: the text is this project's documentation, a token for each word or sign, and the logits are random
but for the right next token. The target's pass is not timed.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch

from decode import Sampling, Step, Tree
from proposers import AnswerStore, MergedProposer
from proposers.sources import RecyclingSource, SuffixSource

VOCABULARY = 49152  # the default model's
CONTEXTS = 200, 1000, 4000, 8000  # tokens of the prompt
STORED = 1 << 20  # tokens of the store
ANSWER = 128  # tokens of each of its answers


def read_text() -> list[int]:
    """The documentation as tokens."""
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *sorted(root.glob("docs/*.md"))]
    words = re.findall(r"\w+|[^\w\s]", "\n".join(page.read_text() for page in pages))
    ids = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return [ids[word] for word in words]


def fill_store(text: list[int]) -> AnswerStore:
    """A full store: answers begin anywhere in the text, and a tenth of their tokens are others."""
    choose, store = random.Random(0), AnswerStore(STORED)
    for _ in range(STORED // ANSWER):
        begin = choose.randrange(len(text) - ANSWER)
        answer = text[begin : begin + ANSWER]
        store.add([choose.randrange(VOCABULARY) if choose.random() < 0.1 else token for token in answer])
    return store


def replay(text: list[int], context: int, proposer: MergedProposer, steps: int) -> Iterator[float]:
    """The seconds of each draft for an answer that goes on as the text does. The first reads the prompt."""
    noise = torch.randn(1, 65, VOCABULARY, generator=torch.Generator().manual_seed(0))
    target: Any = SimpleNamespace(device=torch.device("cpu"), vocabulary=VOCABULARY)
    tree, path, end = Tree.chain([text[context - 1 : context]]), [0], context
    for number in range(steps):  # `end` tokens are known; the last is the bonus token
        end += len(path)
        logits = noise[:, : tree.width].clone()
        for place, node in enumerate(path):
            logits[0, node, text[end - len(path) + place]] += 12
        step = Step(
            is_prefill=number == 0,
            request_ids=[0],
            kept=[0],
            sequences=[text[:end]],
            room=[1000],
            committed=[text[:context] if number == 0 else text[end - 1 - len(path) : end - 1]],
            path=[path],
            tree=tree,
            logits=logits,
            features=None,
            seconds=0.03,
            sampling=Sampling(),
            stop_ids=frozenset(),
            target=target,
        )
        begun = perf_counter()
        tree = proposer.propose(step, 64)
        yield perf_counter() - begun
        path = walk(tree, text[end:])


def walk(tree: Tree, text: list[int]) -> list[int]:
    """The nodes of a tree that are the beginning of the text after its root."""
    places = zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), strict=True)
    children = {place: node for node, place in enumerate(places)}
    path = [0]
    while (node := children.get((path[-1], text[len(path) - 1]))) is not None:
        path.append(node)
    return path


@torch.inference_mode()
def time_drafts(text: list[int], context: int, proposer: MergedProposer, steps: int) -> tuple[float, float]:
    """The milliseconds that reading the prompt takes, and those of a step: the median."""
    first, *others = replay(text, context, proposer, steps)
    return 1000 * first, 1000 * median(others)


@torch.inference_mode()
def measure_memory(text: list[int], context: int, proposer: MergedProposer, steps: int) -> float:
    """The megabytes that a proposer keeps after so many steps, the store not included."""
    gc.collect()
    tracemalloc.start()
    for _ in replay(text, context, proposer, steps):
        pass
    gc.collect()
    held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/proposers/*")])
    tracemalloc.stop()
    return sum(trace.size for trace in held.traces) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="drafts of each text (default: 200)")
    parser.add_argument("--nodes", type=int, default=16, help="size of the trees (default: 16)")
    options = parser.parse_args()
    nodes, steps = options.nodes, options.steps
    torch.set_num_threads(1)
    text = read_text()
    store = fill_store(text)
    makers: dict[str, Callable[[], MergedProposer]] = {
        "suffix": lambda: MergedProposer([SuffixSource()], nodes=nodes),
        "recycling": lambda: MergedProposer([RecyclingSource()], nodes=nodes),
        "merged": lambda: MergedProposer(nodes=nodes),
        "merged, store": lambda: MergedProposer(store=store, nodes=nodes),
    }
    print(f"| tokens | {' | '.join(makers)} | reading the prompt | memory |")
    print(f"|---:|{'---:|' * (len(makers) + 2)}")
    for context in CONTEXTS:
        times = {name: time_drafts(text, context, make(), steps) for name, make in makers.items()}
        memory = measure_memory(text, context, makers["merged"](), steps)
        columns = [f"{each:.2f} ms" for _, each in times.values()]
        print(f"| {context:,} | {' | '.join(columns)} | {times['merged'][0]:.1f} ms | {memory:.1f} MB |")
    print(f"\nThe store holds {len(store):,} tokens in {store.nbytes / 1e6:.0f} MB.")


if __name__ == "__main__":
    main()
