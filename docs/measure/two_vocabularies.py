"""Drafts with another tokenizer: whether samples keep the target's distribution, and the map of two real vocabularies.

    python -m docs.measure.two_vocabularies [--samples N] [--model MODEL --draft-model MODEL] [--out FILE]

Samples: third tokens of a tiny model's answers, with this project's proposer and with transformers' `generate`, where
the draft has another tokenizer. They are compared with their exact probabilities.
Map: the shared tokens compared with all pairs of tokens, and 500 texts that are
carried over token by token.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from decode import Sampling, Target, generate
from decode.models.loading import load_model
from proposers import DraftProposer
from proposers.draft_models.vocabulary import ROLES, DraftText, VocabularyMap, read_bytes
from scripts.benchmark.files import find_commit

LETTERS = "abcdefghijkl", "hgfedcbaxyz"  # of the target and of the draft: eight are shared
PROMPT, TEXTS = "abca", 500
PARTS = ["a", " the", "\t", "\n\n", "def f(x):\n    return x", "\xe9", "\u0645\u0631\u062d\u0628\u0627", "\u4f60\u597d"]
PARTS += ["\U0001f642", "\U0001f469\u200d\U0001f467", "\U0001d4b3", "<|im_start|>", "<s>", " 1234", "\u2013"]


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


def check_map(model: str | None, draft_model: str) -> dict[str, Any]:
    """Compare the shared tokens with all pairs, and carry texts over. Raises AssertionError for a difference."""
    pairs = [load_model(name, accelerate="off") for name in (draft_model, model)]
    sizes = [int(each.config.get_text_config(decoder=True).vocab_size) for each, _ in pairs]
    draft, target = (tokenizer for _, tokenizer in pairs)
    del pairs
    vocabulary = VocabularyMap(draft, target, *sizes)
    spelt = [spell(each) for each in (draft, target)]
    by_text: dict[bytes, int] = {}
    for token, text in sorted(spelt[0].items()):
        if token < sizes[0]:
            by_text.setdefault(text, token)
    known = [(getattr(draft, role), getattr(target, role)) for role in ROLES]
    expected = {(ours, theirs) for ours, theirs in known if ours is not None and theirs is not None}
    seen = set[bytes]()
    for token, text in sorted(spelt[1].items()):
        if text in by_text and text not in seen and token < sizes[1]:
            expected.add((by_text[text], token))
        seen.add(text)
    found = {*zip(vocabulary.draft_ids.tolist(), vocabulary.target_ids.tolist(), strict=True)}
    assert found == expected, f"{len(found ^ expected)} pairs differ"
    draw = random.Random(0)
    for _ in range(TEXTS):
        text = "".join(draw.choice(PARTS) for _ in range(draw.randint(1, 20)))
        tokens = target(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        written, before, begin = DraftText(vocabulary), list[int](), draw.randint(1, len(tokens))
        for end in range(begin, len(tokens) + 1):
            ids = written.follow(tokens[:end])
            assert ids[: len(before)] == before, f"ids changed in {text!r}"
            before = [*ids]
        marks = len(vocabulary.begins_with)
        carried = b"".join(vocabulary.draft_bytes.get(token, b"") for token in written.ids[marks:])
        assert carried == text.encode(), f"{text!r} became {carried!r}"
    return {
        "draft's tokens": len(spelt[0]),
        "target's tokens": len(spelt[1]),
        "shared": len(found),
        "share of the draft's": round(len(found) / len(spelt[0]), 3),
        "share of the target's": round(len(found) / len(spelt[1]), 3),
        "texts carried over": TEXTS,
    }


def spell(tokenizer: Any) -> dict[int, bytes]:
    """The bytes of each token by another way than the map's: those that its decoder adds after a letter."""
    special = {token for token, each in tokenizer.added_tokens_decoder.items() if each.special}
    letters = {character: byte for byte, character in bytes_to_unicode().items()}
    known, backend = {}, tokenizer.backend_tokenizer
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1]
    own = read_bytes(tokenizer)
    for name, token in tokenizer.get_vocab().items():
        if token in special:
            continue
        text = backend.decode([anchor, token], skip_special_tokens=False)
        if "\ufffd" not in text:
            known[token] = text.removeprefix("a").encode()
        elif name.startswith("<0x"):
            known[token] = bytes([int(name[3:5], 16)])
        else:  # a part of a character, or the sign for one that is none
            is_parts = all(each in letters for each in name)
            known[token] = bytes(letters[each] for each in name) if is_parts else own[token]
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--model")
    parser.add_argument("--draft-model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    report: dict[str, Any] = {"transformers": transformers.__version__, "commit": find_commit()}
    report["samples"] = measure_samples(args.samples)
    if args.draft_model:
        report["map"] = check_map(args.model, args.draft_model)
        report["map back"] = check_map(args.draft_model, args.model)
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
