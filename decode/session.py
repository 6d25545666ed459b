"""One batch while it is decoded: the target's KV cache, and the forward pass over the next tree.

Shapes: B rows, N nodes, T tokens (padded to the longest row), V vocabulary, H hidden size, F = H x captured layers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.devices.transfer import Upload, copy_packed, waits
from decode.kv_cache import TreeCache
from decode.models.grouped_attention import LONG, count_seen
from decode.models.stock_model import StockModel, capture_features
from decode.trees.check import check_on_device
from decode.trees.masks import tree_masks
from decode.trees.sampling import Sampling
from decode.trees.tree import Tree

CHUNK = 512  # tokens of a row in a forward pass of a prefill, if not more pay (`choose_chunk`)
MASK_BYTES = 1 << 28  # of a mask in it
GROUP = 16  # rows of a prefill at most ...
ALIKE = 32  # ... whose lengths differ by less than this, because padding costs as much as tokens
Fuse: TypeAlias = Callable[[Tensor], Tensor]  # from features [B, T, F] to what a proposer needs of them, [B, T, *]
Read: TypeAlias = tuple[
    Tensor, Tensor | None
]  # the logits after each prompt [B, V], and its tokens' features [B, T, *]


@dataclass(frozen=True)
class Verdict:
    """The target's result for a tree.

    logits [B, N, V]: after each node. features [B, N, F]: hidden states of the nodes; None unless layers were named.
    packed: what `decode.trees.accept.unpack` reads, if the tree was accepted in the same step.
    """

    logits: Tensor
    features: Tensor | None
    packed: Tensor | None = None

    def first(self, rows: int, nodes: int) -> Verdict:
        """The same for the first rows, and of each the first nodes."""
        features = None if self.features is None else self.features[:rows, :nodes]
        return Verdict(self.logits[:rows, :nodes], features, None if self.packed is None else self.packed[:rows])

    def select(self, rows: Sequence[int]) -> Verdict:
        """The same for some rows only."""
        index = copy_packed({"rows": torch.tensor(rows)}, self.logits.device)["rows"]
        return Verdict(self.logits[index], None if self.features is None else self.features[index])


class Session:
    """The target's KV cache for one batch: `verify` runs the target over a tree, `keep` commits a path of it."""

    alike = ALIKE
    keeps_beginnings = False  # whether rows with a state can go back to a beginning of their text; others always can

    def __init__(self, target: StockModel, batch: int, layers: Sequence[int] = ()) -> None:
        self.target = target
        self.layers = tuple(layers)
        self.cache = TreeCache(batch, target.config.num_hidden_layers)
        self._moves: Tensor | None = None  # of the nodes kept last; they are made with the next forward pass
        self._upload: Upload | None = None
        self._memory: Tensor | None = None  # for the logits of flat passes

    @property
    def lengths(self) -> list[int]:
        """The number of committed tokens of each row."""
        return self.cache.lengths

    def count_given(self) -> list[int]:
        """How many committed tokens of each row the next pass computes once more; see `decode.recurrent`."""
        return [0] * len(self.lengths)

    def open(self, batch: int) -> Session:
        """An empty session for the same target and layers, without graphs."""
        return Session(self.target, batch, self.layers)

    def begin_upload(self) -> Upload:
        """What the next forward pass needs on the device. Whatever else is added is copied with it."""
        self._upload = Upload(self.target.device)
        self._upload.add({"lengths": torch.tensor(self.cache.lengths)})
        if self._moves is not None:
            self._upload.add({"moves": self._moves})
        return self._upload

    def place(self, tree: Tree) -> Tree:
        """The tree on the target's device."""
        if tree.tokens.device == self.target.device or waits(tree.tokens):
            return tree.to(self.target.device)
        upload, tensors = self._upload or self.begin_upload(), tree.tensors()
        upload.add(tensors)
        return tree.with_tensors({name: upload[name] for name in tensors})

    def check(self, tree: Tree, roots: Tensor, nodes: int) -> Tree:
        """Trees that were made on a GPU, at most `nodes` large, with their faults mended and marked.

        roots [B]: the bonus tokens. See `decode.trees.check`.
        """
        return check_on_device(tree, roots, nodes, self.target.vocabulary)

    @torch.no_grad()
    def verify(
        self, tree: Tree, *, start: int = 0, only: Sequence[int] | None = None, sampling: Sampling | None = None
    ) -> Verdict:
        """One forward pass over a tree, after the committed tokens.

        start: compute only the nodes from this one on; those before it were verified by the last call and are still in
        the cache (a tree that grows level by level). only: the nodes to compute logits for, which then are [B, n, V].
        sampling: what all rows sample by, without logits processors; a session may then accept the tree in the same
        pass.
        """
        target, count = self.target, tree.width - start
        upload = self._upload or self.begin_upload()
        tree = self.place(tree)
        if self._moves is not None:
            self.cache.move(upload["moves"])
        self._moves = self._upload = None
        unmasked = self._needs_no_mask(tree, start)
        lengths = self.cache.reserve(start, count, target.device, upload["lengths"], exact=unmasked)
        if target.passes_flat and tree.batch > 1 and not bool((real := tree.real[:, start:]).all()):
            return self._run_flat(tree, start, lengths, real, range(count) if only is None else only)
        extra: dict[str, Any] = {} if only is None else {"logits_to_keep": torch.tensor(only, device=target.device)}
        verdict = self._run_model(tree, start, lengths, **extra)
        if only is not None and verdict.logits.shape[1] != len(only):  # some models ignore `logits_to_keep`
            verdict = replace(verdict, logits=verdict.logits[:, list(only)])
        return verdict

    def _run_model(self, tree: Tree, start: int, lengths: Tensor, **extra: Any) -> Verdict:
        """The model's forward pass. It writes to the slots that the cache has reserved."""
        target = self.target
        with capture_features(target.model, self.layers) as captured:
            output = target.run(self.cache, **self._model_inputs(tree, start, lengths), **extra)
        features = [captured[layer].to(target.device) for layer in self.layers]
        return Verdict(output.logits.to(target.device), torch.cat(features, dim=-1) if features else None)

    def _run_flat(self, tree: Tree, start: int, lengths: Tensor, real: Tensor, only: Sequence[int]) -> Verdict:
        """`_run_model` for the nodes `real` [B, N] as one row of T tokens, without padding.

        The logits of padding are those of an earlier pass: filling them would take as long as a token.
        """
        target, wanted = self.target, torch.zeros_like(real)
        wanted[:, [*only]] = real[:, [*only]]
        keep = wanted[real].nonzero()[:, 0]  # places among the T tokens
        inputs = {name: _flatten(each, real) for name, each in self._model_inputs(tree, start, lengths).items()}
        self.cache.reserve_flat(real)
        with capture_features(target.model, self.layers) as captured:
            logits = target.run(self.cache, real.sum(dim=1), **inputs, logits_to_keep=keep).logits[0]
        padded = self._logits(len(real), len(only), logits)
        padded[wanted[:, [*only]]] = logits if len(logits) == len(keep) else logits[keep]
        if not self.layers:
            return Verdict(padded, None)
        found = torch.cat([captured[layer][0] for layer in self.layers], dim=-1)  # [T, F]
        features = found.new_zeros(*real.shape, found.shape[1])
        features[real] = found
        return Verdict(padded, features)

    def _logits(self, rows: int, nodes: int, like: Tensor) -> Tensor:
        """Memory for logits [B, N, V], the same in each flat pass: new memory takes as long as the pass."""
        size = rows * nodes * like.shape[-1]
        if self._memory is None or self._memory.numel() < size:
            self._memory = like.new_zeros(size)
        return self._memory[:size].view(rows, nodes, -1)

    def _model_inputs(self, tree: Tree, start: int, lengths: Tensor) -> dict[str, Any]:
        """The model's inputs for the nodes from `start` on, after `lengths` [B] committed tokens."""
        target, depth = self.target, tree.depth[:, start:]
        positions = (lengths[:, None] + depth).clamp(max=target.context - 1)
        masks: Any = None
        if self._needs_no_mask(tree, start):
            if any(self.cache.lengths):  # see `grouped_sdpa`
                masks = torch.empty(*tree.tokens.shape, 0, dtype=target.dtype, device=lengths.device)[:, None]
                masks = dict.fromkeys(target.windows, masks) if len(target.windows) > 1 else masks
        else:
            ancestors = None if tree.is_chain else tree.ancestors[:, start:]
            depth = depth if tree.is_chain else tree.depth
            seen = self._count_seen()
            masks = tree_masks(target.windows, lengths, ancestors, depth, self.cache.used, target.dtype, seen)
        return {"input_ids": tree.tokens[:, start:], "attention_mask": masks, "position_ids": positions}

    def _needs_no_mask(self, tree: Tree, start: int) -> bool:
        """Whether the nodes are the next tokens of all rows, and the model hides later ones itself, and faster.

        Without committed tokens, it would not hide unused slots from a single node.
        """
        target, width, lengths = self.target, tree.width, self.cache.lengths
        if not tree.is_chain or start or target.needs_masks:
            return False
        if not any(lengths):
            return width > 1
        is_alike = min(lengths) == max(lengths) and all(span.is_full for span in target.windows.values())
        is_faster = width == 1 or width >= CHUNK or lengths[0] >= LONG
        return target.sees_texts_whole and is_alike and is_faster

    def _count_seen(self) -> int:
        """The slots that all nodes see, if seeing them without a mask is faster."""
        return count_seen(self.cache.lengths) if self.target.sees_texts_whole else 0

    def extend(self, tokens: Sequence[Sequence[int]], fuse: Fuse | None = None) -> Read:
        """Commit tokens at the end of each row, at least one each.

        Returns the logits after each row's last token [B, V], and the features of all new tokens [B, T, F], or what
        `fuse` makes of them, one forward pass after another.
        """
        groups = group_by_length([*map(len, tokens)], self.alike)
        is_simple = len(groups) == 1 and len({*map(tuple, tokens)}) == len(tokens)
        if is_simple or any(self.lengths):  # only empty rows can be filled in groups, and equal texts be read once
            return run_through(self.read(tokens, fuse))
        logits: list[Tensor] = [torch.empty(0)] * len(tokens)
        features: list[Tensor] = [torch.empty(0)] * len(tokens)
        for rows in groups:
            group_logits, group_features = self.renew(rows, [tokens[row] for row in rows], fuse)
            for index, row in enumerate(rows):
                logits[row] = group_logits[index]
                if group_features is not None:
                    features[row] = group_features[index, : len(tokens[row])]
        return torch.stack(logits), pad_sequence(features, batch_first=True) if self.layers else None

    def renew(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], fuse: Fuse | None = None) -> Read:
        """Empty these rows and commit new tokens to them. Returns what `extend` does, for these rows."""
        unique, sources = find_unique(tokens)
        session = self.open(len(unique))
        logits, features = session.extend(unique, fuse)
        self._move_now()
        self.cache.replace(rows, session.cache, sources)
        return logits[sources], None if features is None else features[sources]

    def add_rows(self, count: int) -> None:
        """Add empty rows after the others."""
        self._move_now()
        self.cache.add_rows(count)

    def join(self, other: Session, sources: Sequence[int]) -> None:
        """Add rows after the others, with what is committed in the rows `sources` of another session."""
        begin = len(self.lengths)
        other._move_now()
        self.add_rows(len(sources))
        self.cache.replace(range(begin, begin + len(sources)), other.cache, sources)

    def copy_from(self, other: Session, row: int, source: int, length: int) -> None:
        """Replace an empty row by the first `length` tokens of another session's row `source`."""
        other._move_now()
        self.cache.replace([row], other.cache, [source])
        self.rewind(row, length)

    def find_beginning(self, row: int, length: int) -> int:
        """The most tokens of a row that it can go back to, `length` at most."""
        return min(length, self.cache.lengths[row])

    def rewind(self, row: int, length: int) -> None:
        """Go back to the first tokens of a row, as many as `find_beginning` finds."""
        self.cache.lengths[row] = self.find_beginning(row, length)

    def count_state_bytes(self, row: int) -> int:
        """The bytes of a row beyond its keys and values."""
        return 0

    def read(
        self, tokens: Sequence[Sequence[int]], fuse: Fuse | None = None, most: int | None = None
    ) -> Generator[None, None, Read]:
        """`extend` for all rows at once, some tokens of each in a forward pass. Yields between passes.

        most: tokens of all rows in a pass; None takes as many as are fastest.
        """
        logits: list[Tensor] = [torch.empty(0)] * len(tokens)
        longest, features = max(map(len, tokens)), torch.empty(0)
        chunk = choose_chunk(self.target, len(tokens), longest + max(self.lengths))
        chunk = chunk if most is None else min(chunk, max(most // len(tokens), 1))
        for begin in range(0, longest, chunk):
            if begin:
                yield
            parts = [each[begin : begin + chunk] for each in tokens]
            ending = [row for row, part in enumerate(parts) if part and begin + len(part) == len(tokens[row])]
            last = sorted({len(parts[row]) - 1 for row in ending}) or [0]  # a model computes at least one position
            verdict = self.verify(Tree.chain(parts), only=last)
            self.keep([list(range(len(part))) for part in parts])
            for row in ending:
                logits[row] = verdict.logits[row, last.index(len(parts[row]) - 1)]
            if verdict.features is not None:
                part = verdict.features if fuse is None else fuse(verdict.features)
                if begin == 0:  # all at once: joining parts would need twice the memory
                    features = part.new_empty(len(tokens), longest, part.shape[2])
                features[:, begin : begin + chunk] = part
            del verdict
        return torch.stack(logits), features if self.layers else None

    def keep(self, path: Sequence[Sequence[int]]) -> None:
        """Commit the nodes of each row's path, root first, and forget the rest of the tree."""
        self._move_now()
        width = max(map(len, path), default=0)
        padded = [[*row, *range(len(row), width)] for row in path]
        self._moves = self.cache.plan_moves(torch.tensor(padded, dtype=torch.long))
        self._upload = None
        self.cache.commit([len(row) for row in path])

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order: `rows[i] >= i`. Nodes that were not kept are lost."""
        self._move_now()
        self.cache.select(rows)

    def close(self) -> None:
        """The rows that are left have ended."""

    @torch.inference_mode()  # the cache may have been made in it
    def clear_free_slots(self) -> None:
        """Zero all slots beyond the committed tokens: 0 times a NaN in a hidden slot would be NaN."""
        self._move_now()
        self.cache.clear_free_slots()

    @torch.inference_mode()  # the cache may have been made in it
    def _move_now(self) -> None:
        if self._moves is not None:
            self.cache.move(copy_packed({"moves": self._moves}, self.target.device)["moves"])
        self._moves = self._upload = None


def _flatten(inputs: Any, real: Tensor) -> Any:
    """An input [B, N, ...] of the nodes `real` as [1, T, ...]; masks [B, 1, N, S], or a dict, as [1, 1, T, S]."""
    if isinstance(inputs, dict):
        return {name: _flatten(each, real) for name, each in inputs.items()}
    return inputs[:, 0][real][None, None] if inputs.dim() == 4 else inputs[real][None]


def choose_chunk(target: StockModel, rows: int, longest: int) -> int:
    """The tokens of each row in a forward pass of a prefill, after which `longest` tokens are committed.

    On a CPU, longer passes are not faster. A GPU needs them long; its memory for a mask limits them, which is repeated
    for the heads of a group.
    """
    largest = target.backend.pass_tokens
    if target.sees_texts_whole and all(span.is_full for span in target.windows.values()):
        return max(CHUNK, largest // rows)
    heads = getattr(target.config, "num_attention_heads", 0)  # 0: no layer attends
    repeats = heads // (getattr(target.config, "num_key_value_heads", None) or max(heads, 1)) or 1
    return max(CHUNK, min(largest, MASK_BYTES // (longest * target.dtype.itemsize * repeats)) // rows)


def run_through(reading: Generator[None, None, Read]) -> Read:
    """The result of a reading, without a pause."""
    while True:
        try:
            next(reading)
        except StopIteration as end:
            result: Read = end.value
            return result


def group_by_length(lengths: Sequence[int], alike: int = ALIKE) -> list[list[int]]:
    """The indices of texts of these lengths; lengths in a group differ by less than `alike`."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or len(groups[-1]) == GROUP or lengths[row] - lengths[groups[-1][0]] >= alike:
            groups.append([])
        groups[-1].append(row)
    return groups


def find_unique(texts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """The texts without repetitions, and for each text its index among these."""
    unique: dict[tuple[int, ...], int] = {}
    sources = [unique.setdefault(tuple(text), len(unique)) for text in texts]
    return [*map(list, unique)], sources
