"""The loop: propose, verify, accept, keep, for the rows of a batch that requests join and leave.

Plain decoding is the same loop with a proposer that drafts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from decode.devices.transfer import Upload, list_numbers, waits
from decode.proposer import Proposer, Step, Use, check_layers
from decode.reading import Prefixes, Text
from decode.request import Request
from decode.requests.answer import Chunk, LogProbs
from decode.session import Inputs, Session, Verdict
from decode.stats import Seconds, Stats
from decode.target import Target
from decode.trees.accept import WRONG_TREE, AcceptanceRule, Accepted, accept, accept_rows, unpack
from decode.trees.noise import KEY_NAMES, row_keys
from decode.trees.sampling import Sampling, group_rows
from decode.trees.tree import Tree


@dataclass
class Verified:
    """The last pass of some rows: their trees, and what was accepted of them.

    For requests that have just joined, the pass is the one that read their prompts: the tree is the prompt's last token
    and the features are those of the whole prompts, as the proposer fuses them.
    """

    requests: list[Request]
    tree: Tree
    verdict: Verdict
    accepted: Accepted
    places: list[int]  # each row's index in this pass
    is_new: bool = False  # it read the prompts

    def select(self, rows: Sequence[int]) -> Verified:
        """The same for some rows only."""
        parts = self.tree.select(rows), self.verdict.select(rows), self.accepted.select(rows)
        requests, places = [self.requests[row] for row in rows], [self.places[row] for row in rows]
        return Verified(requests, *parts, places, self.is_new)

    def list_running(self) -> list[int]:
        """The rows of requests that go on. The last ones take the places of others: moving a row takes time."""
        running = [row for row, request in enumerate(self.requests) if request.finish is None]
        late = [row for row in running if row >= len(running)]
        return [row if self.requests[row].finish is None else late.pop() for row in range(len(running))]


class Batch:
    """The requests that are decoded together, a row each. It ends with its last request.

    nodes: the most nodes of a tree, root included. rule: how trees are accepted. prefixes: gets the texts of requests
    that have ended.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        nodes: int,
        rule: AcceptanceRule,
        rows: int,
        prefixes: Prefixes | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self.target, self.nodes, self.rule, self.prefixes = target, nodes, rule, prefixes
        self.layers, self.fuse = proposer.layers, getattr(proposer, "fuse", None)
        self._finish = getattr(proposer, "finish", None)
        if (begin := getattr(proposer, "begin", None)) is not None:
            begin(target)
        check_layers(proposer, target)
        self._use = Use(proposer)
        plain = inputs is None
        self.session = target.open(rows, self.layers) if plain else Session(target, rows, self.layers, inputs=inputs)
        self.session.keeps_beginnings = prefixes is not None
        self._rows: list[Verified] = []  # in order: those of the last pass, and those that have joined since
        self._verifying = 0.0  # seconds of the last pass
        self._features: dict[int, list[Tensor]] = {}  # of each text, by request id, if they are kept for prefixes

    @property
    def requests(self) -> list[Request]:
        """The requests of all rows, in their order."""
        return [request for part in self._rows for request in part.requests]

    def step(self) -> list[Chunk]:
        """Propose, verify, accept and keep. Returns what that added to each answer."""
        seconds, requests = Seconds.begin(), self.requests
        step, upload = self._make_step(requests)
        with seconds.measure("proposer"), self.target.backend.running():
            most = max(min(request.nodes, self.nodes) for request in requests)
            drafted = self._use.propose(step, most if max(step.room) > 1 else 1)
        with seconds.measure("target"):
            limits = [min(request.nodes, self.nodes) for request in requests]
            tree = self.session.place(self._prepare(drafted, step, upload, limits))
            verdict = self.session.verify(tree, sampling=self._find_sampling(requests))
        with seconds.measure("accept"):
            accepted = self._accept(requests, tree, verdict, upload)
        if WRONG_TREE in accepted.bonus:  # found on a GPU; no text has changed
            with self._use.checking():
                drafted.to(torch.device("cpu")).check(len(requests), most, self.target.vocabulary, step.bonus)
            wrong = requests[accepted.bonus.index(WRONG_TREE)].request_id
            raise ValueError(f"request {wrong}: the draft tree is not valid")
        self.session.keep(accepted.path)
        # On a GPU the time of the target shows up in `accept`, which synchronizes.
        self._verifying = seconds.target + seconds.accept
        self._rows = [Verified(requests, tree, verdict, accepted, [*range(len(requests))])]
        return self._deliver(self._rows[0], seconds)

    def join(self, requests: list[Request], logits: Tensor, features: Tensor | None, seconds: Seconds) -> list[Chunk]:
        """Choose the first tokens of requests whose prompts are read; they are the last rows of the session.

        logits [B, V] after the prompts; features [B, T, F] of these, fused. seconds: that reading took.
        """
        tree = Tree.chain([request.prompt[-1:] for request in requests])
        verdict = Verdict(logits[:, None], features)
        with seconds.measure("accept"):
            noise = Upload(self.target.device)
            noise.add(_list_keys(requests, 1))
            accepted = self._accept(requests, tree, verdict, noise)
        self._rows.append(Verified(requests, tree, verdict, accepted, [*range(len(requests))], is_new=True))
        return self._deliver(self._rows[-1], seconds)

    def release(self) -> bool:
        """Free the rows of requests that have ended. Returns whether others are left; if not, the batch ends."""
        requests, kept, parts, begin = self.requests, list[int](), list[Verified](), 0
        for part in self._rows:
            running = part.list_running()
            kept += [begin + row for row in running]
            begin += len(part.requests)
            if running:
                parts.append(part if len(running) == len(part.requests) else part.select(running))
        for row, request in enumerate(requests):
            if request.finish and request.call is not None:
                request.call.record_row(request.request_id, self.session, row)
        if self.prefixes is not None and len(kept) < len(requests):
            for text, request in zip(self.list_texts(), requests, strict=True):
                if request.finish not in (None, "error"):
                    self.prefixes.add(text)
                if request.finish:
                    self._features.pop(request.request_id, None)
        if not kept:
            self.close()
        elif len(kept) < len(requests):
            self.session.select(kept)
            self._rows = parts
            if any(request.finish == "error" for request in requests):
                self.session.clear_free_slots()
        return bool(kept)

    def list_texts(self) -> list[Text]:
        """The text of each row, as far as its keys, values and features are known."""
        texts = []
        for row, request in enumerate(self.requests):
            features = self._features.get(request.request_id, [])
            length = self.session.cache.lengths[row]
            length = min(length, sum(map(len, features))) if self.layers else length
            texts.append(Text(tuple(request.sequence[:length]), self.session, row, features))
        return texts

    def close(self) -> None:
        """End the batch. Its proposer may serve another one then."""
        self.session.close()
        self._use.end()

    def _make_step(self, requests: list[Request]) -> tuple[Step, Upload]:
        """What the proposer sees of the last pass, and all that the next one needs on the device, copied at once."""
        parts = self._rows
        committed = [
            each.prompt if part.is_new else tokens
            for part in parts
            for each, tokens in zip(part.requests, part.accepted.tokens, strict=True)
        ]
        path = [nodes for part in parts for nodes in part.accepted.path]
        upload, bonus = self.session.begin_upload(), [request.sequence[-1] for request in requests]
        upload.add({"roots": torch.tensor(bonus)} | _list_keys(requests, self.nodes))
        if self.layers:
            upload.add(list_numbers(committed, bonus, path))
        if self.target.backend.waits:
            upload.add({"limits": torch.tensor([each.room - 1 for each in requests])})
        features = [found for part in parts if (found := self._find_features(part, upload)) is not None]
        self._keep_features(features)
        width = max(part.tree.width for part in parts)
        step = Step(
            request_ids=[request.request_id for request in requests],
            kept=[None if part.is_new else place for part in parts for place in part.places],
            sequences=[request.sequence for request in requests],
            room=[request.room for request in requests],
            committed=committed,
            path=path,
            tree=parts[0].tree if len(parts) == 1 else Tree.join([part.tree for part in parts]),
            logits=_join([part.verdict.logits for part in parts], width),
            features=_join(features, max(part.shape[1] for part in features)) if features else None,
            seconds=self._verifying,
            samplings=[request.sampling for request in requests],
            stop_ids=[request.limits.stop_ids for request in requests],
            target=self.target,
            given=max(self.session.count_given()),
            upload=upload,
        )
        return step, upload

    def _find_features(self, part: Verified, upload: Upload) -> Tensor | None:
        """The features [B, T, F] of the tokens that some rows have committed, as the proposer fuses them."""
        features = part.verdict.features
        if features is None or part.is_new:
            return features
        path = upload["path"][: len(features), :, None]
        features = features.gather(1, path.expand(-1, -1, features.shape[2]))
        return features if self.fuse is None else self.fuse(features)

    def _keep_features(self, features: Sequence[Tensor]) -> None:
        """Keep the features of each row's committed tokens, if texts are kept."""
        if self.prefixes is None:
            return
        for part, found in zip(self._rows, features, strict=False):
            for row, (request, tokens) in enumerate(zip(part.requests, part.accepted.tokens, strict=True)):
                count = len(request.prompt) if part.is_new else len(tokens)
                self._features.setdefault(request.request_id, []).append(found[row, :count].clone())

    def _prepare(self, tree: Tree, step: Step, upload: Upload, limits: Sequence[int]) -> Tree:
        """The tree, checked and without draft tokens that a row has no room for.

        They would cost time, and the model may have no positions for them. The bonus token needs room as well.
        """
        depths, most = [room - 1 for room in step.room], max(limits)
        if not (waits(tree.tokens) and self.target.backend.waits) or self.target.is_recurrent:
            tree = tree.to(torch.device("cpu"))
            with self._use.checking():
                tree.check(len(step.room), most, self.target.vocabulary, step.bonus)
            tree = (tree.best_chains() if self.target.is_recurrent else tree).cut(depths)
        else:
            tree = tree.to(upload.device)
            tree = self.session.check(tree, upload["roots"], most).cut(depths, upload["limits"])
        return tree if min(limits) >= tree.width else tree.limit(limits)

    def _find_sampling(self, requests: Sequence[Request]) -> Sampling | None:
        """How all rows choose tokens, if a graph can do it; None otherwise."""
        if not self.target.has_graphs or self.rule is not accept or requests[0].sampling.processors:
            return None
        groups = group_rows([request.sampling for request in requests])
        return groups[0][0] if len(groups) == 1 else None

    def _accept(self, requests: list[Request], tree: Tree, verdict: Verdict, noise: Upload) -> Accepted:
        """What is accepted of each row's tree."""
        if verdict.packed is not None:
            return unpack(verdict.packed)
        texts = {request.request_id: request.sequence for request in requests}
        samplings = [request.sampling for request in requests]
        return accept_rows(self.rule, tree, verdict.logits, samplings, texts, noise)

    def _deliver(self, part: Verified, seconds: Seconds) -> list[Chunk]:
        """Add a pass's tokens to the answers. Returns a chunk per row."""
        rows = zip(part.requests, part.accepted.tokens, part.accepted.bonus, part.accepted.sizes, strict=True)
        found = [(request, request.extend(path[1:], bonus), size) for request, path, bonus, size in rows]
        seconds.finish()
        chunks = []
        for row, (request, chunk, size) in enumerate(found):
            stats = Stats(1, len(chunk.tokens), size - 1, [1] * chunk.drafted, seconds)
            chunk = replace(chunk, stats=stats)
            if request.log_probs is not None:
                nodes = part.accepted.path[row][: len(chunk.tokens)]  # a token was chosen after each
                told = find_log_probs(part.verdict.logits[row, nodes], chunk.tokens, request.log_probs)
                chunk = replace(chunk, log_probs=told)
            if request.call is not None:
                nodes = part.accepted.path[row][: len(chunk.tokens)]
                request.call.record_logits(request.request_id, part.verdict.logits[row, nodes])
            chunks.append(request.deliver(chunk, self.target.tokenizer))
            if request.finish and size > 1 and self._finish is not None:
                self._finish(request.request_id, chunk.tokens, chunk.drafted)
        return chunks


def find_log_probs(logits: Tensor, tokens: Sequence[int], count: int) -> list[LogProbs]:
    """The log-probabilities of tokens and of the `count` most likely ones, by the logits [n, V] that chose them."""
    log_p = logits.double().log_softmax(dim=-1)
    chosen = log_p[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)].tolist()
    best = log_p.topk(count, dim=-1)
    rows = zip(chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    return [LogProbs(p, dict(zip(ids, values, strict=True))) for p, ids, values in rows]


def _list_keys(requests: Sequence[Request], levels: int) -> dict[str, Tensor]:
    """The keys [B, levels] of each row's noise after its text; none if all are greedy."""
    if all(request.sampling.greedy for request in requests):
        return {}
    seeds = [request.sampling.seed or 0 for request in requests]  # greedy ones have none
    ids, lengths = [request.request_id for request in requests], [len(request.sequence) for request in requests]
    return {name: row_keys(seeds, ids, lengths, levels, stream) for stream, name in KEY_NAMES.items()}


def _join(parts: Sequence[Tensor], width: int) -> Tensor:
    """Tensors [B, *, D] of several rows each, as one [B, width, D], padded with zeros."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([nn.functional.pad(part, (0, 0, 0, width - part.shape[1])) for part in parts])
