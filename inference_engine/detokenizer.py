"""Tokens to text one by one: whole characters only, and never a stop string.

Idea: decoding everything again after each token costs time² and shows half characters as U+FFFD that later
tokens take back. Here the bytes of each token go through an incremental UTF-8 decoder, which keeps an
unfinished character to itself, and the characters go through an automaton of the stop strings, which keeps
to itself what may yet become one. Both are O(1) per byte, whatever the length of the text.

Data flow: id → `Detokenizer` (bytes → whole characters) → `StopStrings` (hold back, cut) → text to show;
`TextStream` is the two in a row, which is what a request has.

Which stop string wins: the one that is complete first; of those that end at the same character, the longest.
So the cut depends on the text alone, not on how tokens divide it, no token has to be generated to settle
it, and the text before the cut holds no stop string.

Worked example: stops "END" and "\\n\\n", tokens "the E", "N", "V", "Y\\n", "\\nx". Shown: "the ", "", "ENV",
"Y", "" and it has stopped by "\\n\\n"; "E" and "EN" were held back, as was "\\n".
"""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import SupportsIndex

from inference_engine.tokenizer import Tokenizer, check_text
from layers.errors import UserError


class Detokenizer:
    """Text of a growing row of tokens.

    What `push` returned, joined, and then `flush()`, is `tokenizer.decode(ids, continues)` to the letter.
    `continues` says that the tokens follow other text (a completion follows its prompt).
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._opened = continues
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: SupportsIndex) -> str:
        """The characters that this token completes, often none.

        Raises:
          UserError: the id is out of the vocabulary.
        """
        return self._characters.decode(self._bytes(token_id))

    def flush(self) -> str:
        """What is left at the end of the text: U+FFFD for an unfinished character, else nothing."""
        return self._characters.decode(b"", final=True)

    def _bytes(self, token_id: SupportsIndex) -> bytes:
        if self._opened:
            return self._tokenizer.token_bytes(token_id)
        data = self._tokenizer.first_token_bytes(token_id)
        self._opened = data is not None
        return data or b""


class StopStrings:
    """Passes text through up to the first stop string, holding back what may become one.

    The automaton is Aho and Corasick's (Communications of the ACM 18, 1975): a node per prefix of a stop
    string, the current one being the longest such prefix that the text ends with. Its length is what is
    held back.

    Raises:
      UserError: a stop string is empty, or no text can hold it (a lone surrogate).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for position, stop in enumerate(stops):
            if not stop:
                raise UserError(f"stop string {position} is empty; it needs at least one character")
            check_text(stop)
        # stopped_by: the stop string that ended the text, None as long as none did.
        self.stopped_by: str | None = None
        self._nodes = _automaton(stops)
        self._node = 0
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is safe to show now; nothing once a stop string was found."""
        if self.stopped_by is not None:
            return ""
        held = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._node = self._next(character)
            self.stopped_by = self._nodes[self._node].complete
            if self.stopped_by is not None:
                self._held = ""
                return held[: end - len(self.stopped_by)]
        safe = len(held) - self._nodes[self._node].depth
        self._held = held[safe:]
        return held[:safe]

    def flush(self) -> str:
        """What was held back, at the end of a text that no stop string ended."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _next(self, character: str) -> int:
        node = self._node
        while node and character not in self._nodes[node].children:
            node = self._nodes[node].fallback
        return self._nodes[node].children.get(character, 0)


class _Node:
    """A prefix of a stop string: its length, longer prefixes, and the longest prefix that ends it."""

    __slots__ = ("children", "complete", "depth", "fallback")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.children: dict[str, int] = {}
        self.fallback = 0
        self.complete: str | None = None  # the longest stop string that this prefix ends with


def _automaton(stops: Sequence[str]) -> list[_Node]:
    nodes = [_Node(0)]
    for stop in stops:
        node = 0
        for character in stop:
            if character not in nodes[node].children:
                nodes.append(_Node(nodes[node].depth + 1))
                nodes[node].children[character] = len(nodes) - 1
            node = nodes[node].children[character]
        nodes[node].complete = stop
    _link_fallbacks(nodes)
    return nodes


def _link_fallbacks(nodes: list[_Node]) -> None:
    """Breadth first, so that the fallback of every shorter prefix is known."""
    queue = deque(nodes[0].children.values())
    while queue:
        parent = nodes[queue.popleft()]
        if parent.complete is None:
            parent.complete = nodes[parent.fallback].complete
        for character, child in parent.children.items():
            fallback = parent.fallback
            while fallback and character not in nodes[fallback].children:
                fallback = nodes[fallback].fallback
            nodes[child].fallback = nodes[fallback].children.get(character, 0)
            queue.append(child)


class TextStream:
    """The text of one request as its tokens come: `Detokenizer`, then `StopStrings`.

    The caller ends generation once `stopped_by` is set; `flush()` gives what is left at any other end.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), continues: bool = False) -> None:
        self._detokenizer = Detokenizer(tokenizer, continues)
        self._stops = StopStrings(stops)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, None as long as none did."""
        return self._stops.stopped_by

    def push(self, token_id: SupportsIndex) -> str:
        """The text that may be shown after this token; raises `UserError` for an id out of the vocabulary."""
        return self._stops.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """The rest of the text, to be called once, when no more tokens come."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
