"""A proposer of your own: each token is expected to be followed by what followed it last time.

python examples/own_proposer.py [MODEL]
draftless bench --methods none,examples/own_proposer.py:BigramProposer
"""

import sys
from itertools import pairwise

from draftless import Step, Target, Tree, generate


class BigramProposer:
    """Drafts a chain of bigrams that occurred earlier in the prompt or the answer."""

    layers = ()  # the target's hidden states that it needs: none

    def propose(self, step: Step, budget: int) -> Tree:
        chains = []
        for tokens in step.sequences:  # one list a row: the prompt and the answer so far
            follows = dict(pairwise(tokens))
            chain = tokens[-1:]  # the root: the row's bonus token
            while len(chain) < min(budget, 5) and chain[-1] in follows:
                chain.append(follows[chain[-1]])
            chains.append(chain)
        return Tree.chain(chains)


def main(name: str | None = None) -> None:
    target = Target.load(name)
    prompts = ["Count from one to ten, three times.", "Repeat after me: red, green, red, green, red, green."]
    plain = generate(target, prompts, None, max_new_tokens=64)
    drafted = generate(target, prompts, BigramProposer(), max_new_tokens=64)
    for before, after in zip(plain, drafted, strict=True):
        print(after.text)
        print(f"tau {after.stats.tau:.2f}; the same tokens as plain decoding: {before.tokens == after.tokens}")


if __name__ == "__main__":
    main(*sys.argv[1:])
