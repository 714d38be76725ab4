"""Tokens as they come: what `PEAGLEInference.stream` iterates over, and what `generate` feeds it with."""

import re
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer


# The repository root is both a folder of scripts and a remote-code package; only this form of import serves both.
try:
    from .decoding_peagle import DecodingStats
    from .tree_peagle import DraftTree
except ImportError:
    from decoding_peagle import DecodingStats
    from tree_peagle import DraftTree


# A token that stands for one byte. Tokenizers decode a run of them as a whole, either to text or each to a `\ufffd`.
BYTE = re.compile("<0x[0-9A-F]{2}>")


@dataclass
class StreamedToken:
    """One new token: its id, the text that it completes (perhaps none), and the depth that drafted it (0 is the first),
    None for the target's own."""

    token: int
    text: str
    depth: int | None


class TokenStream(Iterator):
    """Iterates over [`StreamedToken`]s. At the end `result` is the [`Generation`], before that None; `stats`, its
    [`DecodingStats`], are filled while it decodes, ahead of the tokens that were read."""

    def __init__(self, tokens: Generator, feed: "TokenFeed"):
        self._tokens, self._feed, self.stats, self.result = tokens, feed, feed.stats, None

    def __next__(self) -> StreamedToken:
        try:
            return next(self._tokens)
        except StopIteration as end:
            self.result = self.result or end.value
            raise

    def close(self):
        """Stops decoding, after the forward that is running; from any thread. Dropping the stream does the same."""
        self._feed.closed = True
        with suppress(ValueError):  # another thread is reading: it will find the end
            self._tokens.close()


class StreamClosed(BaseException):
    """Nobody reads on. No error of decoding, so that no handler there takes it for one."""


class TokenFeed(BaseStreamer):
    """Turns tokens into [`StreamedToken`]s in `queue`, none of whose texts has half a character.

    A token that ends within a character waits for the one that completes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.stats, self.queue, self.closed = tokenizer, DecodingStats(), SimpleQueue(), False
        self.decoder, self.unread, self.waiting, self.shown = DecodeStream(skip_special_tokens=True), [], [], 0
        self.silent = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}

    def put(self, value: torch.Tensor):
        if self.closed:
            raise StreamClosed
        if not self.stats.origins:  # the prompt
            return
        token = value.item()
        self.unread.append(token)
        self.waiting.append(StreamedToken(token, "", self.stats.origins[-1]))
        # Bytes are decoded a run at a time, and tokens without text, unknown and special ones, do not end a run.
        word = self.tokenizer.backend_tokenizer.id_to_token(token)
        if word is not None and token not in self.silent and not BYTE.fullmatch(word):
            text, self.unread = self.decoder.step(self.tokenizer.backend_tokenizer, self.unread), []
            if text:
                self.release(text)

    def end(self):
        pass  # the result follows, see `finish`

    def finish(self, result):
        if self.waiting:
            self.release(result.text[self.shown :])
        self.queue.put(result)

    def release(self, text: str):
        self.waiting[-1].text = text
        self.shown += len(text)
        for token in self.waiting:
            self.queue.put(token)
        self.waiting = []


class PlainFeed(TokenFeed):
    """The same of plain decoding, whose stats are told here: each token after the first is a round without drafts."""

    clock = None

    def put(self, value: torch.Tensor):
        now = time.perf_counter()
        before, self.clock = self.clock, now
        if before is not None:  # else this is the prompt
            if self.stats.origins:
                self.stats.record(DraftTree.chain([]), accepted=0, emitted=1, draft_time=0.0, verify_time=now - before)
            else:
                self.stats.prefill_seconds = now - before
            self.stats.total_seconds += now - before
            self.stats.origins.append(None)
        super().put(value)
