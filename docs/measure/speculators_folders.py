"""Heads that draft in one pass, in speculators' own model classes: the same logits from a folder of ours and of theirs.

    python -m docs.measure.speculators_folders    (needs speculators 0.9)

Tiny heads in float32: with and without a pair score, a draft vocabulary, a draft from the anchor's row, and a window in
some layers, which is longer than the text; DFlash2; P-EAGLE of one and of several layers.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import speculators.models.dflash.core as dflash
import speculators.models.peagle.core as peagle
import torch
from speculators.models.dflash2.core import DFlash2DraftModel
from speculators.models.dspark.core import DSparkDraftModel
from torch import Tensor

from decode import Target
from heads import LayerCache, load_head, save_head
from heads.formats.layout import OWN
from proposers.dflash import NEVER, DFlashDrafter
from proposers.eagle import draft_ahead
from proposers.feature_history import FeaturePart
from tests.support.drafting import LAYER, make_head
from tests.support.models import VOCABULARY, tiny

LENGTH, ANCHOR = 16, 9
NETWORKS: dict[str, Any] = {
    "dflash": dflash.DFlashDraftModel,
    "dspark": DSparkDraftModel,
    "dflash2": DFlash2DraftModel,
    "peagle": peagle.PEagleDraftModel,
}
MARGINAL = {"pair_rank": 0, "from_anchor": False}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {}),
    ("dflash", {"draft_size": 40}),
    ("dflash", MARGINAL),
    ("dflash", MARGINAL | {"draft_size": 40}),
    ("dflash", {"layer": replace(LAYER, qk_norm=True, window=LENGTH), "causal": True, "full_layers": (1,)}),
    ("dflash", {"candidates": 7, "taps": 2, "group": 4, "from_anchor": False}),
    ("peagle", {"draft_size": 40}),
    ("peagle", {"layers": 3, "fc_norm": True}),
]


def draft(folder: Path, target: Target, features: Tensor, tokens: Tensor) -> Tensor:
    """The logits [L, D] of our drafter after a text, along its tokens."""
    head: Any = load_head(folder)
    if head.output == "target":
        head.borrow(target.output_matrix)
    cache, before = LayerCache(1), features[:, :ANCHOR]
    if head.kind == "peagle":
        embed = head.embed_tokens or target.model.get_input_embeddings()
        part = FeaturePart(head.fuse(before), tokens[:, 1 : ANCHOR + 1], torch.tensor([ANCHOR]), [ANCHOR])
        return head.logits(draft_ahead(head, embed, cache, part, *head.unknown(head.depth - 1)))[0]
    cache.write(*head.read(head.fuse(before), torch.arange(ANCHOR)[None]))
    cache.keep([ANCHOR])
    drafter = DFlashDrafter(head, tokens[:, ANCHOR], cache, target.model.get_input_embeddings())
    logits = []
    for level in range(head.depth):
        logits.append(drafter.logits(level)[0, 0])
        drafter.extend(torch.tensor([[0]]), tokens[:, ANCHOR + 1 + level][:, None])
    return torch.stack(logits)


def compute(model: Any, features: Tensor, tokens: Tensor, levels: int) -> Tensor:
    """The same by speculators, from one block after the anchor."""
    dflash.select_anchors = lambda *_: (torch.tensor([ANCHOR]), torch.tensor([True]))
    everything = torch.ones(1, LENGTH), torch.zeros(1, LENGTH, features.shape[2] // 3), torch.zeros(1, LENGTH).long()
    states, logits, *_, places = model._backbone_forward(features, tokens, *everything, max_anchors=1)
    rows = 1, model.block_size, -1
    if getattr(model, "markov_head", None) is not None:
        before = tokens[0, places].view(rows[:2])
        logits = logits.view(rows) + model.markov_head.block_bias(
            prev_token_ids=before, hidden_states=states.view(rows)
        )
    if isinstance(model, DFlash2DraftModel):
        before = model._predecessor_ids(tokens, places)
        chosen, scores = model.candidate_selector.select(logits.view(rows), states.view(rows), before)
        logits = torch.full_like(logits.view(rows), NEVER).scatter(-1, chosen, scores)
    return logits.view(rows)[0, -levels:]


def compute_parallel(model: Any, features: Tensor, tokens: Tensor, levels: int) -> Tensor:
    """The same by speculators' P-EAGLE, whose token at a place is the one after its feature."""
    places = torch.arange(ANCHOR), torch.full((levels - 1,), ANCHOR - 1)
    depths = torch.zeros(ANCHOR, dtype=torch.long), torch.arange(1, levels)
    peagle.generate_cod_sample_indices = lambda **_: (torch.cat(places), torch.cat(depths))
    peagle.compute_metrics = lambda logits, **_: (logits, {})
    last, same = features[..., : features.shape[2] // 3], torch.zeros(1, LENGTH).long()
    return model(features, tokens.roll(-1, dims=1), same, verifier_last_hidden_states=last)[1][0, -levels:]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder))


@torch.no_grad()
def compare(place: Path) -> None:
    """Save heads in a folder, and read them there with both programs."""
    source = tiny("llama", num_hidden_layers=4, dtype=torch.float32)
    source.save_pretrained(place / "model")
    target = Target(source)
    features, tokens = torch.randn(1, LENGTH, 3 * 32), torch.randint(VOCABULARY, (1, LENGTH))
    for number, (kind, settings) in enumerate(CASES):
        ours, theirs = place / f"ours-{number}", place / f"theirs-{number}"
        save_head(make_head(kind, target, target_name=str(place / "model"), **settings), ours)
        config = json.loads((ours / "config.json").read_text())
        network = NETWORKS[config["speculators_model_type"]]
        loaded = network.config_class.from_pretrained(ours)
        loaded.transformer_layer_config._attn_implementation = "eager"
        model = network.from_pretrained(ours, config=loaded).float().eval()
        if kind == "peagle":  # our folder has no embeddings, and this class does not take the target's
            model.embed_tokens.load_state_dict(source.get_input_embeddings().state_dict())
        found = draft(ours, target, features, tokens)
        run = compute_parallel if kind == "peagle" else compute
        expected = run(model, features, tokens, len(found))
        model.save_pretrained(theirs)
        config = json.loads((theirs / "config.json").read_text())
        config.pop(OWN, None)  # so that it is read as theirs
        (theirs / "config.json").write_text(json.dumps(config))
        errors = [float((each - expected).abs().max()) for each in (found, draft(theirs, target, features, tokens))]
        print(f"{network.__name__} {settings}: ours there {errors[0]:.0e}, theirs here {errors[1]:.0e}")


if __name__ == "__main__":
    main()
