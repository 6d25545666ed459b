"""Embeddings and output matrices in the folders of published heads: copies of the target's are shared, others used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Target
from heads import load_head, save_head
from heads.checkpoint import find_kind
from heads.eagle import choose_features
from proposers import load_draft_head, load_proposer
from tests.decode.test_lossless import PROMPTS
from tests.proposers.test_head_proposers import Written, agree, has_room
from tests.support.drafting import Recorder, make_head, texts
from tests.support.gguf_files import write_model
from tests.support.models import tiny
from tests.support.published_heads import EAGLE, READ, write
from training.factory import make_objective

VOCABULARY = 24
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of the head, and what is special to its config
    "eagle": ({}, {"bias": False}),
    "eagle3": ({"features": (1, 2)}, {READ: [1, 2]}),
    "peagle": (
        {"features": (1, 2)},
        {READ: [1, 2], "mask_token_id": 3, "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}},
    ),
    "dflash": (
        {"features": (1, 2), "pair_rank": 0, "from_anchor": False},
        {"block_size": 4, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]}, "num_target_layers": 2},
    ),
    "hydra": ({"output": "own", "output_bias": True, "projected": True, "heads": 3}, {}),
}
Matrices = dict[str, Tensor]  # by the names of an EAGLE head


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama", vocab_size=VOCABULARY))


def publish(folder: Path, head: Any, matrices: Matrices, **config: Any) -> Path:
    """Write a folder of a head in its published format, with these matrices."""
    states = {name: state for name, state in head.state_dict().items() if name not in matrices} | matrices
    if head.kind == "hydra":
        names = {"grounded.": "hydra_mlp.", ".linear": ".0.linear", ".residual": ".0.res_connection"}
        names |= {"lm_heads.": "hydra_lm_head.", "embed_tokens.": "input_embed_fn."}
        for before, after in names.items():
            states = {name.replace(before, after): state for name, state in states.items()}
    layer = getattr(head.config, "layer", None)
    sizes = {} if layer is None else {"num_attention_heads": layer.num_attention_heads, "rope_theta": layer.rope_theta}
    norms = {} if layer is None else {"rms_norm_eps": layer.rms_norm_eps}
    more = KINDS[head.kind][1]
    content = EAGLE | sizes | norms | {"vocab_size": head.vocab_size, "hidden_size": head.hidden_size} | more | config
    folder.mkdir(exist_ok=True)
    return write(folder, "hydra_lm_head.safetensors" if head.kind == "hydra" else "model.safetensors", states, content)


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(kind: str, target: Target, **settings: Any) -> Any:
    return make_head(kind, target, **KINDS[kind][0], **{"target_layers": None, **settings})


@pytest.mark.parametrize(
    ("kind", "output"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in KINDS if kind != "hydra")]
)
@torch.no_grad()
def test_what_differs_from_the_targets_is_used(kind: str, output: bool, target: Target, tmp_path: Path) -> None:
    """The drafts are those that the published code would make, and the text stays the same."""
    given: Any = {"embedding": True, **({"output": "shared"} if output else {})}
    if kind in ("eagle3", "peagle") and not output:
        given["output"] = "target"
    head = make(kind, target, **given)
    matrices = {"embed_tokens.weight": draw(VOCABULARY, 32)}
    matrices |= {"lm_head.weight": draw(VOCABULARY, 32, seed=4)} if output else {}
    head.load_state_dict(matrices, strict=False)
    folder = publish(tmp_path, head, matrices)
    loaded = load_head(folder, vocab_size=VOCABULARY)
    proposer: Any = load_proposer(
        folder, target, nodes=10, **({"depth": 3, "width": 4} if kind in ("eagle", "eagle3") else {})
    )
    for found in (loaded, proposer.head):
        assert found.config.embedding and found.output == head.output
        assert torch.equal(found.embed_tokens.weight, matrices["embed_tokens.weight"])

    plain = texts(target, PROMPTS, None, max_new_tokens=30, stop_ids=[])
    recorder = Recorder(proposer)
    assert texts(target, PROMPTS, recorder, max_new_tokens=30, stop_ids=[]) == plain
    drafted = [(text, paths) for text, paths in recorder.drafted.items() if len(paths) == 9 and has_room(text)]
    assert len(drafted) > 20
    for text, paths in drafted[::8]:
        assert agree(paths, Written(target, head, text).grow(proposer, 10))
    more = {"steps": 2} if kind in ("eagle", "eagle3") else {}
    objective = make_objective(loaded, target, "kl", 0.8, **more)
    assert torch.equal(objective.embed(torch.tensor([5, 7])), matrices["embed_tokens.weight"][[5, 7]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("file_dtype", "target_dtype"), [(0, 0), (0, 1), (1, 0), (1, 2), (0, 2)])
def test_copies_are_shared_in_any_dtype(kind: str, file_dtype: int, target_dtype: int, tmp_path: Path) -> None:
    dtypes = torch.float64, torch.bfloat16, torch.float32
    model = tiny("llama", vocab_size=VOCABULARY).to(torch.float32)  # what was trained
    embeddings, output = (each.weight.detach().clone() for each in (model.model.embed_tokens, model.lm_head))
    target = Target(model.to(dtypes[target_dtype]))
    matrices = {"embed_tokens.weight": embeddings} | ({"lm_head.weight": output} if kind == "eagle" else {})
    matrices = {name: matrix.to(dtypes[file_dtype]) for name, matrix in matrices.items()}
    folder = publish(tmp_path / "head", make(kind, target), matrices)
    assert {each.dtype for each in load_head(folder, vocab_size=VOCABULARY).parameters()} == {
        target.dtype
    }  # of the rest
    head: Any = load_draft_head(folder, target)
    assert head.embed_tokens is None and not head.config.embedding
    assert kind != "eagle" or head.config.output == head.output == "target"
    save_head(head, tmp_path / "saved")
    assert "embed_tokens.weight" not in load_head(tmp_path / "saved").state_dict()


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash"])
@torch.no_grad()
def test_a_target_that_scales_its_embeddings(kind: str, tmp_path: Path) -> None:
    """A head's code looks up the file's rows as they are; only block heads read the target's raw ones."""
    target = Target(tiny("gemma3_text", vocab_size=VOCABULARY))
    tokens, raw, scale = torch.tensor([3, 5]), target.embedding_matrix, target.embedding_scale
    assert scale != 1
    for name, matrix in (("raw", raw), ("scaled", raw * scale)):
        proposer: Any = load_proposer(
            publish(tmp_path / name, make(kind, target), {"embed_tokens.weight": matrix}, num_target_layers=3), target
        )
        torch.testing.assert_close(proposer.embedding(target)(tokens), matrix[tokens])
        assert proposer.head.config.embedding == ((name == "raw") != (kind == "dflash"))


def test_embeddings_may_have_rows_for_tokens_that_the_target_does_not_have(target: Target, tmp_path: Path) -> None:
    copy = torch.cat([target.embedding_matrix, draw(8, 32)])
    own = draw(VOCABULARY + 8, 32)
    for name, matrix, is_own in (("copy", copy, False), ("own", own, True)):
        folder = publish(tmp_path / name, make("eagle", target), {"embed_tokens.weight": matrix})
        head: Any = load_draft_head(folder, target)
        assert (head.config.vocab_size, head.config.embedding) == (VOCABULARY, is_own)
        assert not is_own or torch.equal(head.embed_tokens.weight, own[:VOCABULARY])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "dflash"])
def test_an_output_matrix_next_to_padded_embeddings(kind: str, padded: bool, target: Target, tmp_path: Path) -> None:
    head = make(kind, target, embedding=True, output="shared")
    rows = VOCABULARY + 8 * padded
    matrices = {"embed_tokens.weight": draw(VOCABULARY + 8, 32), "lm_head.weight": draw(rows, 32, seed=4)}
    folder = publish(tmp_path, head, matrices)
    assert find_kind(folder) == kind
    load_proposer(folder, target)
    loaded: Any = load_head(folder, vocab_size=VOCABULARY), load_draft_head(folder, target)
    for found in loaded:
        assert found.config.vocab_size == VOCABULARY and found.draft_size == VOCABULARY
        assert torch.equal(found.embed_tokens.weight, matrices["embed_tokens.weight"][:VOCABULARY])
        assert torch.equal(found.lm_head.weight, matrices["lm_head.weight"][:VOCABULARY])


def test_the_output_matrices_of_hydra_may_be_padded_too(target: Target, tmp_path: Path) -> None:
    head = make("hydra", Target(tiny("llama", vocab_size=VOCABULARY + 8)), embedding=True)
    folder = publish(tmp_path, head, {"embed_tokens.weight": draw(VOCABULARY + 8, 32)}, vocab_size=VOCABULARY)
    loaded: Any = load_head(folder, vocab_size=VOCABULARY)
    for own, given in zip(loaded.lm_heads, head.lm_heads, strict=True):
        assert torch.equal(own.weight, given.weight[:VOCABULARY]) and torch.equal(own.bias, given.bias[:VOCABULARY])


def test_other_numbers_of_output_rows_need_a_map(target: Target, tmp_path: Path) -> None:
    head = make("eagle", target, embedding=True, output="shared")
    for rows in (VOCABULARY - 4, VOCABULARY + 4):
        matrices = {"embed_tokens.weight": draw(VOCABULARY + 8, 32), "lm_head.weight": draw(rows, 32)}
        with pytest.raises(ValueError, match=f"token_map or d2t, which must map its {rows} output rows to 24 tokens"):
            load_proposer(publish(tmp_path, head, matrices), target)


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_tell_the_vocabulary_size_if_the_config_does_not(kind: str, target: Target, tmp_path: Path) -> None:
    head = make(kind, target, embedding=True)
    folder = publish(tmp_path, head, {"embed_tokens.weight": draw(VOCABULARY, 32)}, vocab_size=None)
    assert find_kind(folder) == kind
    assert load_head(folder).config.vocab_size == VOCABULARY


@pytest.mark.parametrize("nested", [[], None])
def test_an_empty_list_of_layers_means_the_default(nested: Any, tmp_path: Path) -> None:
    target = Target(tiny("llama", vocab_size=VOCABULARY, num_hidden_layers=8))
    head = make_head("eagle3", target, features=choose_features(8))
    folder = publish(tmp_path, head, {}, **{READ: [], "eagle_config": {READ: nested}})
    assert find_kind(folder) == "eagle3"
    proposer: Any = load_proposer(folder, target)
    assert proposer.head.config.features == choose_features(8)
    publish(tmp_path, head, {}, **{READ: [], "eagle_config": {READ: [0, 2, 4]}})
    assert load_head(folder, layers=8).config.features == (1, 3, 5)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_target_whose_matrices_are_in_blocks(tied: bool, tmp_path: Path) -> None:
    write_model("llama", tmp_path / "m.gguf", tie_word_embeddings=tied)
    target = Target.load(tmp_path / "m.gguf", accelerate="packed", dtype="float32")
    copies = {"embed_tokens.weight": target.embedding_matrix.clone(), "lm_head.weight": target.output_matrix.clone()}
    for name, added in (("copies", 0.0), ("own", 0.01)):
        matrices = {name: matrix + added for name, matrix in copies.items()}
        folder = publish(tmp_path / name, make("eagle", target), matrices, vocab_size=target.vocabulary)
        head: Any = load_draft_head(folder, target)
        assert (head.config.embedding, head.config.output) == ((True, "shared") if added else (False, "target"))


def test_a_head_for_a_target_of_another_depth_is_refused(target: Target, tmp_path: Path) -> None:
    folder = publish(tmp_path, make("dflash", target), {}, num_target_layers=4)
    message = "this head was trained for another target, whose number of layers is 4; this target's is 2$"
    with pytest.raises(ValueError, match=message):
        load_proposer(folder, target)
    assert load_head(publish(tmp_path, make("dflash", target), {})).config.target_layers == 2


def test_layers_that_the_target_does_not_have_are_named_as_in_the_file(target: Target, tmp_path: Path) -> None:
    for config, named, numbers in (
        ({READ: [1, 3]}, rf"{READ}: \[1, 3\]", "0 to 2"),
        ({READ: None, "eagle_config": {READ: [0, 2]}}, rf"eagle_config.{READ}: \[0, 2\]", "-1 to 1"),
    ):
        folder = publish(tmp_path, make("eagle3", target), {}, **config)
        with pytest.raises(
            ValueError, match=f"its config has {named}; .* numbers from {numbers}, because the target has"
        ):
            load_proposer(folder, target)
