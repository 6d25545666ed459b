"""The loop: propose, verify, accept, keep, for the rows of a batch that requests join and leave.

Plain decoding is the same loop with a proposer that drafts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decode.devices.transfer import Upload, list_numbers, waits
from decode.grammars.matcher import constrain, forbid
from decode.prefill import Prefixes, Read, Text
from decode.proposer import Drafting, Proposer, Step, join_rows
from decode.reading import Reading
from decode.request import Request
from decode.requests.answer import Chunk, LogProbs, Seconds, Stats
from decode.session import Session, Verdict
from decode.target import Target
from decode.trees.accept import WRONG_TREE, AcceptanceRule, Accepted, accept, accept_rows, unpack
from decode.trees.noise import KEY_NAMES, row_keys
from decode.trees.sampling import NO_TOKEN, Sampling, group_rows
from decode.trees.tree import Tree


class Batch:
    """The requests that are decoded together, a row each. It begins with the first prompts and ends with the last row.

    nodes: the most nodes of a tree, root included. rule: how trees are accepted. prefixes: gets the texts of requests
    that have ended; None: none are kept. version: of the weights.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        nodes: int,
        rule: AcceptanceRule,
        prefixes: Prefixes | None,
        version: int,
    ) -> None:
        self.target, self.nodes, self.rule, self.prefixes, self.version = target, nodes, rule, prefixes, version
        self.drafting = Drafting(proposer, target)
        self.session: Session | None = None  # until the first prompts are read
        self._own: Session | None = None  # the same while they are read
        self.last: Step | None = None
        self._features: dict[int, list[Tensor]] = {}  # of each text, by request id, if they are kept for prefixes

    @property
    def requests(self) -> list[Request]:
        """The requests of all rows, in their order."""
        return last.requests if (last := self.last) is not None else []  # other threads ask, too

    def step(self) -> list[Chunk]:
        """Propose, verify, accept and keep. Returns what that added to each answer."""
        assert self.session is not None and self.last is not None
        seconds, step, requests = Seconds(), self.last, self.last.requests
        limits = [min(request.nodes, self.nodes) for request in requests]
        depths = [request.room - 1 for request in requests]  # the bonus token needs room as well
        upload = self._begin(self.session, step, depths)
        seconds.lap("rest")
        with self.target.backend.running():
            drafted = self.drafting.propose(step, max(limits) if max(depths) > 0 else 1)
        seconds.lap("proposer")
        tree, allowed = self._prepare(drafted, step, upload, limits, depths), dict[int, Tensor]()
        if any(request.constraint for request in requests):
            tree, allowed = constrain(tree, [request.constraint for request in requests])
        tree = self.session.place(tree)
        sampling = self._find_sampling(requests) if self.target.has_graphs else None
        verdict = self.session.verify(tree, sampling=sampling)
        seconds.lap("target")
        if verdict.packed is not None:
            accepted = unpack(verdict.packed)
        else:
            accepted = self._accept(requests, tree, verdict.logits, upload, allowed)
            if NO_TOKEN in accepted.bonus and tree.width > 1 and tree.q is None:
                tree, verdict, accepted = self._verify_roots(step) or (tree, verdict, accepted)
        seconds.lap("accept")
        if WRONG_TREE in accepted.bonus:  # found on a GPU; no text has changed
            with self.drafting.checking():
                drafted.to(torch.device("cpu")).check(max(limits), self.target.vocabulary, step.bonus)
            wrong = requests[accepted.bonus.index(WRONG_TREE)].request_id
            raise ValueError(f"request {wrong}: the draft tree is not valid")
        self.session.keep(accepted.path)
        kept = list[int | None](range(len(requests)))
        done = Step(self.target, requests, kept, accepted.tokens, accepted.path, tree, verdict.logits)
        done.states, self.last = verdict.features, done
        chunks = self._deliver(done, accepted, seconds)
        if self.drafting.adaptive and self.session is not None and self.session.is_warm:
            sizes = accepted.sizes
            nodes = step.given + (sum(sizes) / len(sizes) if self.target.passes_flat else max(sizes))
            self.target.learn_cost(step.sequences, nodes, seconds.target + seconds.accept + seconds.rest)
        return chunks

    def _verify_roots(self, step: Step) -> tuple[Tree, Verdict, Accepted] | None:
        """The pass without draft tokens: where the states of one overflow, masks do not keep NaN from other nodes.

        None if requests have processors, which may not see the same text twice, or if steps are graphs.
        """
        requests, session = step.requests, self.session
        assert session is not None
        if self.target.has_graphs or any(request.sampling.processors for request in requests):
            return None
        session.clear_free_slots()
        tree = Tree.chain([[root] for root in step.bonus])
        tree, allowed = constrain(tree, [request.constraint for request in requests])
        tree, noise = tree.to(self.target.device), Upload(self.target.device)
        noise.add(_list_keys(requests, 1))
        verdict = session.verify(tree)
        return tree, verdict, self._accept(requests, tree, verdict.logits, noise, allowed)

    def open(self, rows: int, is_whole: bool, inputs: Any = None) -> Session:
        """An empty session. The first one that `is_whole`, a row for each request, becomes the batch's own."""
        is_own, layers = self.session is None and is_whole, self.drafting.layers
        if is_own and inputs is None:
            session = self.target.open(rows, layers)
        else:
            session = Session(self.target, rows, layers, inputs=inputs)
        session.keeps_beginnings = self.prefixes is not None
        self._own = session if is_own else None
        return session

    def find(self, prompt: list[int]) -> Text | None:
        """A beginning of the prompt that is computed already."""
        return None if self.prefixes is None else self.prefixes.find(self.target, prompt, self.list_texts())

    def join(self, reading: Reading, read: Read) -> list[Chunk]:
        """Add rows for requests whose prompts are read, and choose their first tokens.

        After an error, which may be a lack of memory, the others can go on.
        """
        session, last = self.session, self.last
        rows = 0 if session is None else len(session.lengths)
        try:
            return self._join(reading, read)
        except RuntimeError:
            self.session, self.last = session, last
            if session is not None:
                session.select(range(rows))
            raise

    def _join(self, reading: Reading, read: Read) -> list[Chunk]:
        requests, seconds, (logits, features) = reading.requests, reading.seconds, read
        if self.session is None and reading.session is self._own and reading.is_whole:
            self.session = self._own
        else:
            self.session = self.session or self.open(0, is_whole=True)
            self.session.join(reading.session, reading.rows)
        seconds.lap("target")
        tree, noise = Tree.chain([request.sequence[-1:] for request in requests]), Upload(self.target.device)
        noise.add(_list_keys(requests, 1))
        tree, allowed = constrain(tree, [request.constraint for request in requests])
        tree = tree.to(logits.device)  # rows are selected there
        accepted = self._accept(requests, tree, logits[:, None], noise, allowed)
        seconds.lap("accept")
        committed, kept = [[*request.sequence] for request in requests], list[int | None]([None] * len(requests))
        joined = Step(self.target, requests, kept, committed, accepted.path, tree, logits[:, None], features)
        self.last = joined if self.last is None else self.last.join(joined)
        return self._deliver(joined, accepted, seconds)

    def release(self) -> bool:
        """Free the rows of requests that have ended. Returns whether others are left."""
        if self.session is None or self.last is None:
            return False
        requests, running = self.requests, self.last.list_running()
        if len(running) == len(requests):
            return True
        for row, request in enumerate(requests):
            if request.finish and request.call is not None:
                request.call.record_row(request.request_id, self.session, row)
        if self.prefixes is not None:
            self.session.settle()  # an error in the middle would spoil the others
            for text, request in zip(self.list_texts(), requests, strict=True):
                if request.finish not in (None, "error"):
                    self.prefixes.add(text, self.version)
                if request.finish:
                    self._features.pop(request.request_id, None)
        if not running:
            self.close()
            return False
        self.session.select(running)
        self.last = self.last.select(running)
        if any(request.finish == "error" for request in requests):
            self.session.clear_free_slots()
        return True

    def list_texts(self) -> list[Text]:
        """The text of each row, as far as its keys, values and features are known."""
        texts = []
        for row, request in enumerate(self.requests):
            assert self.session is not None
            features = self._features.get(request.request_id, [])
            length = self.session.cache.lengths[row]
            length = min(length, sum(map(len, features))) if self.drafting.layers else length
            texts.append(Text(tuple(request.sequence[:length]), self.session, row, features))
        return texts

    def close(self) -> None:
        """End all rows. The next prompts that are read begin anew."""
        if (session := self.session or self._own) is not None:
            session.close()
        self.session = self._own = self.last = None

    def _begin(self, session: Session, step: Step, depths: list[int]) -> Upload:
        """Copy all that the next pass needs to the device at once, and find the features of all committed tokens."""
        upload, requests, drafting = session.begin_upload(), step.requests, self.drafting
        upload.add({"roots": torch.tensor(step.bonus)} | _list_keys(requests, self.nodes))
        if drafting.layers:
            upload.add(list_numbers(step.committed, step.bonus, step.path))
        if self.target.backend.waits:
            upload.add({"limits": torch.tensor(depths)})
        step.upload, step.given = upload, 0 if session.states is None else max(session.count_given())
        if step.states is not None:
            path = upload["path"][: len(step.states), :, None]
            found = step.states.gather(1, path.expand(-1, -1, step.states.shape[2]))
            found = found if drafting.fuse is None else drafting.fuse(found)
            step.states, step.features = None, join_rows(found, step.features)
        if self.prefixes is not None and step.features is not None:
            for request, tokens, found in zip(requests, step.committed, step.features, strict=True):
                self._features.setdefault(request.request_id, []).append(found[: len(tokens)].clone())
        return upload

    def _prepare(self, tree: Tree, step: Step, upload: Upload, limits: Sequence[int], depths: list[int]) -> Tree:
        """The tree, checked and without draft tokens that a row has no room for.

        They would cost time, and the model may have no positions for them. depths: that each row has room for.
        """
        assert self.session is not None
        most = max(limits)
        is_read = self.target.is_recurrent or any(request.constraint for request in step.requests)
        if is_read or not (waits(tree.tokens) and self.target.backend.waits):
            tree = tree.to(torch.device("cpu"))
            with self.drafting.checking():
                tree.check(most, self.target.vocabulary, step.bonus)
            if tree.width > int(tree.sizes.min()):  # padding may be of any token
                tree = tree.with_tensors({"tokens": torch.where(tree.real, tree.tokens, 0)})
            tree = (tree.best_chains() if self.target.is_recurrent else tree).cut(depths)
        else:
            tree = tree.to(upload.device)
            tree = self.session.check(tree, upload["roots"], most).cut(depths, upload["limits"])
        return tree if min(limits) >= tree.width else tree.limit(limits)

    def _find_sampling(self, requests: Sequence[Request]) -> Sampling | None:
        """How all rows choose tokens, if a graph can do it; None otherwise."""
        if self.rule is not accept or any(each.sampling.processors or each.constraint for each in requests):
            return None
        groups = group_rows([request.sampling for request in requests])
        return groups[0][0] if len(groups) == 1 else None

    def _accept(
        self, requests: list[Request], tree: Tree, logits: Tensor, noise: Upload, allowed: dict[int, Tensor]
    ) -> Accepted:
        """What is accepted of each row's tree. allowed: by grammars, as `constrain` returns it."""
        texts = {request.request_id: request.sequence for request in requests}
        samplings = [request.sampling for request in requests]
        logits = forbid(logits, allowed) if allowed else logits
        return accept_rows(self.rule, tree, logits, samplings, texts, noise)

    def _deliver(self, step: Step, accepted: Accepted, seconds: Seconds) -> list[Chunk]:
        """Add a pass's tokens to the answers. Returns a chunk per row."""
        rows = zip(step.requests, accepted.tokens, accepted.bonus, accepted.sizes, strict=True)
        found = [(request, request.extend(path[1:], bonus), size) for request, path, bonus, size in rows]
        seconds.lap("rest")
        chunks = []
        for row, (request, chunk, size) in enumerate(found):
            stats = Stats(1, len(chunk.tokens), size - 1, [1] * chunk.drafted, seconds)
            sources = self.drafting.credit(request.request_id, chunk.tokens[: chunk.drafted]) if chunk.drafted else []
            sources += [""] * (len(chunk.tokens) - len(sources))
            chunk = replace(chunk, stats=stats, sources=sources)
            if request.log_probs is not None:
                nodes = accepted.path[row][: len(chunk.tokens)]  # a token was chosen after each
                logits = step.logits[row, nodes] / request.log_probs_at
                told = find_log_probs(logits, chunk.tokens, request.log_probs)
                chunk = replace(chunk, log_probs=told)
            if request.call is not None:
                nodes = accepted.path[row][: len(chunk.tokens)]
                request.call.record_logits(request.request_id, step.logits[row, nodes])
            chunks.append(request.deliver(chunk, self.target.tokenizer))
            if request.finish and size > 1 and self.drafting.finish is not None:
                self.drafting.finish(request.request_id, chunk.tokens, chunk.drafted)
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
    ids, lengths = [request.noise_id for request in requests], [len(request.sequence) for request in requests]
    return {name: row_keys(seeds, ids, lengths, levels, stream) for stream, name in KEY_NAMES.items()}
