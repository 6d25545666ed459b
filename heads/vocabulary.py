"""The end of every head: from hidden states to logits over the target's tokens, or over the most frequent of them.

Shapes: K heads, H hidden size, V the target's vocabulary, D draft vocabulary (D = V without a token map).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

Output = Literal["own", "shared", "target"]


class VocabularyHead(nn.Module):
    """A head that ends in a vocabulary.

    output: "own" is one matrix [D, H] for each of the K heads, "shared" one for all, "target" borrows the target's,
    which is handed in by `borrow`, with its bias if it has one, and is no part of the state. draft_size: D; with
    fewer tokens than the target has, `token_map` [D] says which of the target's tokens each stands for, ascending.
    """

    kind: ClassVar[str]  # its key in HEADS
    config: Any  # its kind's own dataclass
    token_map: Tensor | None
    borrowed: Tensor | None
    borrowed_bias: Tensor | None
    lm_head: nn.Linear
    lm_heads: nn.ModuleList

    def __init__(
        self, heads: int, hidden_size: int, vocab_size: int, draft_size: int, output: Output, bias: bool = False
    ) -> None:
        super().__init__()
        if output not in ("own", "shared", "target"):
            raise ValueError(f"output is {output!r}; choose own, shared or target")
        if not 1 <= draft_size <= vocab_size:
            raise ValueError(f"a draft vocabulary of {draft_size} tokens does not fit one of {vocab_size}")
        self.hidden_size, self.vocab_size, self.draft_size, self.output = hidden_size, vocab_size, draft_size, output
        self.target_hidden_size = hidden_size
        if output == "own":
            self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, draft_size, bias=bias) for _ in range(heads))
        elif output == "shared":
            self.lm_head = nn.Linear(hidden_size, draft_size, bias=bias)
        self.register_buffer("borrowed", None, persistent=False)
        self.register_buffer("borrowed_bias", None, persistent=False)
        self.register_buffer("token_map", torch.arange(draft_size) if draft_size < vocab_size else None)

    def borrow(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take the target's output matrix [V, H] and bias [V]: as this head's own, or as what its own starts from."""
        if weight.shape != (self.vocab_size, self.hidden_size):
            raise ValueError(
                f"the target's output matrix is {list(weight.shape)}, this head's vocabulary needs "
                f"[{self.vocab_size}, {self.hidden_size}]"
            )
        rows, offsets = self.drafted_rows(weight), None if bias is None else self.drafted_rows(bias)
        if self.output == "target":
            dtype = next(self.parameters()).dtype
            self.borrowed = rows.detach().to(dtype)
            self.borrowed_bias = None if offsets is None else offsets.detach().to(dtype)
            return
        for linear in self._matrices():
            linear.weight.data.copy_(rows)
            if linear.bias is not None:
                linear.bias.data.zero_() if offsets is None else linear.bias.data.copy_(offsets)

    def drafted_rows(self, weight: Tensor) -> Tensor:
        """The rows [D, ...] of a matrix or bias [V, ...] that are of tokens which this head guesses."""
        return weight if self.token_map is None else weight[self.token_map.to(weight.device)]

    def check_target(self, hidden_size: int, vocab_size: int, layers: int) -> None:
        """Raise ValueError where the head was trained for a target of other sizes than these."""
        name = self.config.target_name
        for what, own, given in (
            ("hidden size", self.target_hidden_size, hidden_size),
            ("vocabulary size", self.vocab_size, vocab_size),
            ("number of layers", self.config.target_layers, layers),
        ):
            if own is not None and own != given:
                trained = f"for {name}, " if name else "for another target, "
                raise ValueError(f"this head was trained {trained}whose {what} is {own}; this target's is {given}")

    def vocabulary(self, index: int) -> tuple[Tensor, Tensor | None]:
        """The matrix [D, H] and bias [D] of head `index`."""
        matrices = self._matrices()
        if not matrices:
            if self.borrowed is None:
                raise ValueError("this head uses the target's output matrix; hand it in with borrow(weight)")
            return self.borrowed, self.borrowed_bias
        linear = matrices[index % len(matrices)]
        return linear.weight, linear.bias

    def normalise(self, states: Tensor) -> Tensor:
        """States [..., H] as the output matrix reads them; most heads' are so already."""
        return states

    def logits(self, states: Tensor, index: int = 0) -> Tensor:
        """The logits [..., D] of head `index` for its states [..., H]."""
        return nn.functional.linear(self.normalise(states), *self.vocabulary(index))

    def tokens(self, drafted: Tensor) -> Tensor:
        """The target's ids of draft ids."""
        return drafted if self.token_map is None else self.token_map[drafted]

    def _matrices(self) -> list[nn.Linear]:
        """The matrices that are this head's own."""
        if self.output == "own":
            return [linear for linear in self.lm_heads if isinstance(linear, nn.Linear)]
        return [self.lm_head] if self.output == "shared" else []
