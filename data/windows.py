"""Conversations longer than the context to windows: half overlapping, each behind the system prompt and the tools.

A token is supervised in the first window that holds it and context in the next, so none is trained twice.
"""

import hashlib
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import takewhile

import numpy as np

from data.chat_template import MOVED, Chat, Sample, encode_conversation, render
from data.conversations import BadConversation, is_eval, read_conversation


MIN_ROOM = 0.25  # of a window, for the turns; a longer system prompt would repeat itself more than it lets be learnt
ALL_SUPERVISED = "every token is supervised"  # of a chat without a prompt; of all chats, it is a fault of the template
ANSWER = "peagle-probe"  # a text that no template writes by itself


def up_to_words(tokenizer, messages: list[dict], tools=None) -> str:
    """The chat's text up to the words of a user turn after ``messages``: what two such renderings share."""
    asked = ([*messages, {"role": "user", "content": words}] for words in "01")
    return os.path.commonprefix([render(tokenizer, chat, tools) for chat in asked])


def _user_header(tokenizer) -> str | None:
    """What the template writes between the end of an answer and the user's next words; None where it is not found.

    Taken from a chat without system prompt and tools, because a template may repeat or move them there.
    """
    answered = [{"role": "user", "content": "0"}, {"role": "assistant", "content": ANSWER}]
    ending = render(tokenizer, answered, None).rpartition(ANSWER)[2]
    following = up_to_words(tokenizer, answered).rpartition(ANSWER)[2]
    # Some templates end every rendering with an extra EOS.
    for end in (ending, ending.removesuffix(tokenizer.eos_token or "")):
        if following.startswith(end):
            return following.removeprefix(end)
    return None


def find_turns(chat: Chat) -> tuple[int, list[int]]:
    """Where the turns of one chat begin among its tokens.

    Returns the length of the anchor, which is all before the first turn (system prompt, tools, BOS), and the token
    indices, ascending, at which the chat may go on right behind the anchor. Those are the starts of the turns. Where
    the template writes the system prompt into the first user turn, the anchor ends inside that turn, after its
    header; then they are the places after the headers of later user turns. Turns that the template joins to the turn
    before, or whose first token is joined to it, have no start.

    Raises BadConversation where the chat does not start with the anchor, that is where the template writes the system
    prompt or the tools somewhere else (Mistral's: into the last user turn).
    """
    text, messages, spans, tokenizer = chat.text, chat.messages, chat.spans, chat.tokenizer
    lead = list(takewhile(lambda message: message["role"] == "system", messages))
    # Found by comparison, so that templates which begin with a BOS or a default prompt need no rules of their own.
    opening, header = up_to_words(tokenizer, lead, chat.tools), _user_header(tokenizer)
    moved = messages[0].get(MOVED, "")
    opening += moved
    apart = header is not None and opening.endswith(header) and not moved  # the system prompt stands before the turn
    anchor = opening.removesuffix(header) if apart else opening
    if not text.startswith(anchor):
        raise BadConversation("system prompt is not at the start of the chat", "its windows could not repeat it")
    starts = []
    # A generation prompt at the end starts a turn, too.
    for index in range(len(lead) + 1, len(messages) + chat.asks if header is not None else 0):
        try:
            before = chat.until(index)
        except BadConversation:  # a template may refuse to end there
            continue
        if not text.startswith(before):
            before = before.removesuffix(tokenizer.eos_token or "")
        if not apart:
            before += header
        place = bisect_left(spans, len(before), key=lambda span: span[0])
        if text.startswith(before) and place < len(spans) and spans[place - 1][1] <= len(before):
            starts.append(place)
    return bisect_right(spans, len(anchor), key=lambda span: span[1]), starts


def cut_windows(
    input_ids: Collection[int], loss_mask: Collection[int], anchor: int, starts: list[int], max_seq_len: int
) -> list[dict[str, np.ndarray]]:
    """Windows of at most ``max_seq_len`` (>= 8) tokens over an encoded chat that is longer; see `find_turns` for the rest.

    Each window is the first ``anchor`` tokens and then a stretch of the others. The next stretch starts half a
    stretch on, or at the turn start nearest to that if it is within a quarter: neighbours share from a quarter to three
    quarters, and half where a turn is cut. All stretches but the last are full, and the last is longer than a quarter.

    Returns a list of ``input_ids`` (int32) and ``loss_mask`` (int8), arrays of shape (tokens,). Every token is in some
    stretch, and the masks of all windows, each laid over its stretch, add up to ``loss_mask``.
    Raises BadConversation where the anchor leaves less than a quarter of the window.
    """
    ids, mask = np.asarray(input_ids, np.int32), np.asarray(loss_mask, np.int8)
    room = max_seq_len - anchor
    if room < MIN_ROOM * max_seq_len:
        raise BadConversation("system prompt too long", f"{anchor} tokens, which leave no quarter of {max_seq_len}")
    windows, start, seen = [], anchor, 0
    while True:
        stop = min(start + room, len(ids))
        fresh = mask[start:stop].copy()
        fresh[: max(seen - start, 0)] = 0
        before = mask[:anchor] if not windows else np.zeros(anchor, np.int8)
        windows.append(
            {
                "input_ids": np.concatenate([ids[:anchor], ids[start:stop]]),
                "loss_mask": np.concatenate([before, fresh]),
            }
        )
        if stop == len(ids):
            return windows
        seen, half = stop, start + room - room // 2
        near = starts[bisect_left(starts, half - room // 4) : bisect_right(starts, half + room // 4)]
        start = min(near, key=lambda place: abs(place - half), default=half)


def split_sample(sample: Sample, max_seq_len: int) -> list[dict[str, np.ndarray]]:
    """The windows of one sample; one of at most ``max_seq_len`` tokens is its own and only window.

    See `cut_windows` for the result and the errors.
    """
    ids, mask = sample.input_ids, sample.loss_mask
    if len(ids) <= max_seq_len:
        return [{"input_ids": np.array(ids, np.int32), "loss_mask": np.array(mask, np.int8)}]
    return cut_windows(ids, mask, *find_turns(sample.chat), max_seq_len)


class Report:
    """What became of every conversation: "read" = "train" + "eval" + all "skipped: <reason>"; other counts are among the
    kept. ``str()`` lists them, with the first line number of each reason."""

    def __init__(self, counts=(), first=()):
        self.counts, self.first = Counter(dict(counts)), dict(first)

    def skip(self, bad: BadConversation, number: int):
        self.counts[f"skipped: {bad.reason}"] += 1
        self.first.setdefault(f"skipped: {bad.reason}", f" (first in line {number}: {bad})")

    def __str__(self):
        sums = [name for name in self.counts if name.startswith("skipped: ")]
        sums = [name for name in ("read", "train", "eval", *sums) if self.counts[name]]
        kept = [name for name in self.counts if name not in sums and self.counts[name]]
        words = [f"{self.counts[name]} {name}{self.first.get(name, '')}" for name in sums]
        return "; ".join(words + [f"{name} in {self.counts[name]} of the kept" for name in kept])

    def check(self, eval_fraction: float):
        """Raise ValueError where nothing is left to train on, AssertionError where the counts do not add up."""
        skipped = sum(count for name, count in self.counts.items() if name.startswith("skipped: "))
        assert self.counts["read"] == self.counts["train"] + self.counts["eval"] + skipped, self.counts
        if not self.counts["train"] and (not self.counts["eval"] or eval_fraction < 1):
            raise ValueError(f"no conversation left to train on: {str(self) or 'the file is empty'}")


def read_windows(
    rows: Iterable[tuple[int, dict | BadConversation]],
    tokenizer,
    report: Report,
    seen: dict[bytes, None],
    *,
    max_seq_len: int,
    eval_fraction: float,
    stop_token_ids: Collection[int] = (),
) -> Iterator[tuple[int, str, list[dict[str, np.ndarray]]]]:
    """Encode, de-duplicate, split and cut conversations, one at a time.

    ``rows``: as of `read_rows`. ``report`` and ``seen``, a digest of 16 bytes for each conversation, are brought up to date
    before each conversation is yielded. ``eval_fraction``: the share that goes to eval, by their own text, so that no conversation is on
    both sides and none changes sides when rows are added. See `encode_conversation` for the rest.

    Yields (row number, "train" or "eval", windows). Raises ValueError where the tokenizer is unfit, or its template has
    every token of every conversation supervised.
    """
    if max_seq_len < 8 or not 0 <= eval_fraction <= 1:
        raise ValueError(f"need max_seq_len >= 8 and 0 <= eval_fraction <= 1, got {max_seq_len} and {eval_fraction}")
    for number, row in rows:
        report.counts["read"] += 1
        try:
            if isinstance(row, BadConversation):
                raise row
            samples, changes = encode_conversation(row, tokenizer, stop_token_ids)
            if any(all(sample.loss_mask) for sample in samples):
                raise BadConversation(ALL_SUPERVISED)
            ids = b"".join(np.array(sample.input_ids, np.int32).tobytes() for sample in samples)
            digest = hashlib.blake2b(ids, digest_size=16).digest()
            if digest in seen:
                raise BadConversation("duplicate")
            windows = [window for sample in samples for window in split_sample(sample, max_seq_len)]
        except BadConversation as bad:
            report.skip(bad, number)
            continue
        seen[digest] = None
        side = "eval" if is_eval(read_conversation(row)[0], eval_fraction) else "train"
        report.counts.update([side, *changes] + ["cut into windows"] * (len(windows) > len(samples)))
        yield number, side, windows
    if report.counts[f"skipped: {ALL_SUPERVISED}"] and not report.counts["train"] + report.counts["eval"]:
        cause = f"the chat template of tokenizer {tokenizer.name_or_path!r} does not fit this data"
        raise ValueError(f"{ALL_SUPERVISED} in every conversation that could be read: {cause}")
