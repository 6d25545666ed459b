"""A suffix automaton of a growing text: finds all earlier occurrences of the text's last tokens at once.

After Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985). A state stands for the
substrings that end at the same places; a state's link leads to the longest suffix of them that ends elsewhere too.
"""

from __future__ import annotations

COUNTED = 32  # links: a new occurrence is counted for so many suffixes, longest first, so that loops stay fast


class SuffixAutomaton:
    """Append tokens with `extend`, in constant time on average. State 0 is the empty string.

    Lists with an entry per state: `next` by token, `link`, `length` of the longest substring, `count` of occurrences,
    and `latest`, the place after the last one. There are at most two states per token.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count, self.latest = [-1], [0], [0], [0]
        self.size = 0  # tokens read
        self._last = 0  # the state of the whole text

    @property
    def match(self) -> int:
        """The state of the longest suffix of the text that occurred before; 0 if its last token is new."""
        return max(self.link[self._last], 0)

    def extend(self, token: int) -> None:
        """Append a token."""
        self.size += 1
        state, new = self._last, self._add({}, -1, self.length[self._last] + 1, 0)
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._split(state, token)
        else:
            self.link[new] = 0
        self._last = new
        for _ in range(COUNTED):
            self.count[new] += 1
            self.latest[new] = self.size
            new = self.link[new]
            if new <= 0:
                break

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """After a match of `length` tokens in `state`: the state and length of the longest match that ends in `token`.

        (0, 0) if the token has not occurred.
        """
        while token not in self.next[state]:
            if state == 0:
                return 0, 0
            state = self.link[state]
            length = self.length[state]
        return self.next[state][token], length + 1

    def _split(self, state: int, token: int) -> int:
        """The state after `state` and `token` that holds no longer substring; cut off from a larger one if needed."""
        large = self.next[state][token]
        if self.length[large] == self.length[state] + 1:
            return large
        small = self._add(dict(self.next[large]), self.link[large], self.length[state] + 1, self.count[large])
        self.latest[small] = self.latest[large]
        self.link[large] = small
        while state >= 0 and self.next[state].get(token) == large:
            self.next[state][token] = small
            state = self.link[state]
        return small

    def _add(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        self.latest.append(0)
        return len(self.next) - 1
