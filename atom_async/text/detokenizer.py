"""Token ids to text, a few at a time, at a cost that depends only on the new ones.

A text is the concatenation of its tokens' bytes (`TokenBytes`), so an incremental UTF-8 decoder is all
the state there is: it holds back the bytes of a character that is not complete yet, and nothing else.
No earlier token is ever decoded again.

The result is `Tokenizer.decode`'s, with one deliberate difference: in a SentencePiece run of `<0xNN>`
tokens that is not valid UTF-8, whole characters are kept and only the broken bytes become U+FFFD, where
the tokenizers library replaces the entire run. That is known only once the run has ended, and text that
has been sent cannot be taken back.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from atom_async.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one sequence.

    `continues_text`: the tokens go on from other text, so a space before the first word is part of it.
    Otherwise it is dropped where the tokenizer's own decoder drops it (SentencePiece).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._strip = "keep" if continues_text else tokenizer.leading
        self._decoder = _Utf8Decoder("replace")

    @property
    def in_character(self) -> bool:
        """Whether bytes of an incomplete character are held back."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return "".join([self.push_one(token_id) for token_id in token_ids])

    def push_one(self, token_id: int) -> str:
        """The text that this token completes: may be empty, never half a character."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip != "keep" and data:
            data = data.lstrip(b" ") if self._strip == "strip_marks" else data.removeprefix(b" ")
            self._strip = "keep"
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is still held back, at the end: U+FFFD for a character that never became complete."""
        return self._decoder.decode(b"", final=True)
