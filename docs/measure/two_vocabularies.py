"""Drafts with another tokenizer: whether samples keep the target's distribution.

    python -m docs.measure.two_vocabularies [--samples N]

Third tokens of a tiny model's answers, with this project's proposer and with transformers' `generate`, where the draft
has another tokenizer. They are compared with their exact probabilities.
"""

from __future__ import annotations

import argparse
import json
import sys
from types import MethodType
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decode import Sampling, Target, generate
from draftless_commands.benchmark.files import find_commit
from proposers import DraftProposer

LETTERS = "abcdefghijkl", "hgfedcbaxyz"  # of the target and of the draft: eight are shared
PROMPT = "abca"


def make_tokenizer(letters: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are single letters."""
    backend = Tokenizer(models.BPE({name: token for token, name in enumerate(["<s>", "</s>", *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def make_model(size: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=size, initializer_range=0.5, **sizes)).eval()
    model.generation_config.eos_token_id = None
    return model


def sort_vocabulary(tokenizer: Any) -> None:
    """Let `get_vocab` list the tokens in the order of their ids."""
    names = dict(sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]))
    tokenizer.get_vocab = MethodType(lambda self: names, tokenizer)


@torch.no_grad()
def find_third(model: LlamaForCausalLM, prompt: torch.Tensor) -> torch.Tensor:
    """The probabilities [V] of the third token after a prompt [1, T], whatever the first two are."""
    texts, p = prompt, torch.ones(1, dtype=torch.float64)
    for _ in range(2):
        p = (p[:, None] * model(texts).logits[:, -1].double().softmax(dim=-1)).flatten()
        size = model.config.vocab_size
        texts = torch.cat([texts.repeat_interleave(size, dim=0), torch.arange(size).repeat(len(texts))[:, None]], dim=1)
    return p @ model(texts).logits[:, -1].double().softmax(dim=-1)


def compare(counts: torch.Tensor, p: torch.Tensor) -> float:
    """The chi-square statistic of counts [V] against probabilities [V]."""
    expected = p * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def measure_samples(count: int) -> dict[str, Any]:
    """By method, the statistic of so many third tokens."""
    tokenizers = [make_tokenizer(letters) for letters in LETTERS]
    target, assistant = (make_model(len(each), seed) for seed, each in enumerate(tokenizers))
    prompt = tokenizers[0](PROMPT, return_tensors="pt")["input_ids"]
    p = find_third(target, prompt)
    found: dict[str, Any] = {"degrees of freedom": len(p) - 1, "samples": count}
    for name, is_sorted in (("transformers", False), ("transformers, sorted get_vocab", True)):
        draft, own = make_model(len(tokenizers[1]), 1), [make_tokenizer(letters) for letters in LETTERS]
        if is_sorted:
            sort_vocabulary(own[1])
        settings = {"assistant_model": draft, "tokenizer": own[0], "assistant_tokenizer": own[1], "top_k": 0}
        torch.manual_seed(0)
        tokens = []
        for done in range(count):
            if sys.stderr.isatty() and done % 100 == 0:
                print(f"\r{name}: {done} of {count}", end="", file=sys.stderr)
            output: Any = target.generate(prompt, do_sample=True, max_new_tokens=3, pad_token_id=0, **settings)
            tokens.append(int(output[0, -1]))
        found[name] = round(compare(torch.bincount(torch.tensor(tokens), minlength=len(p)), p), 1)
    ours = Target(target, tokenizers[0])
    for name, sampled in (("draftless", False), ("draftless, --sampled", True)):
        proposer = DraftProposer(Target(assistant, tokenizers[1]), sampled=sampled, depth=3, nodes=4)
        answers = generate(
            ours, prompt.tolist() * count, proposer, sampling=Sampling(1.0, seed=2), max_new_tokens=3, stop_ids=()
        )
        counts = torch.bincount(torch.tensor([answer.tokens[2] for answer in answers]), minlength=len(p))
        found[name] = round(compare(counts, p), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1500)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    report: dict[str, Any] = {"transformers": transformers.__version__, "commit": find_commit()}
    report["samples"] = measure_samples(args.samples)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
