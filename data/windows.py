"""Conversations longer than the context to windows: half overlapping, each behind the system prompt and the tools.

A token is supervised in the first window that holds it and context in the next, so none is trained twice.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from itertools import takewhile

import numpy as np

from data.conversations import BadConversation, clean_messages, render


MIN_ROOM = 0.25  # of a window, for the turns; a longer system prompt would repeat itself more than it lets be learnt
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


def find_turns(row: dict, tokenizer) -> tuple[int, list[int]]:
    """Where the turns of one chat begin among its tokens; ``row`` as `encode_conversation` takes it, and good for it.

    Returns the length of the anchor, which is all before the first turn (system prompt, tools, BOS), and the token
    indices, ascending, at which the chat may go on right behind the anchor. Those are the starts of the turns. Where
    the template writes the system prompt into the first user turn, the anchor ends inside that turn, after its
    header; then they are the places after the headers of later user turns. Turns that the template joins to the turn
    before, or whose first token is joined to it, have no start.

    Raises BadConversation where the chat does not start with the anchor, that is where the template writes the system
    prompt or the tools somewhere else (Mistral's: into the last user turn).
    """
    messages, tools, answered = clean_messages(row), row.get("tools") or None, row.get("resp_ids") is not None
    shown = messages[:-1] if answered else messages
    text = render(tokenizer, shown, tools, prompt=answered)
    options = {"return_offsets_mapping": True, "verbose": False}
    spans = tokenizer.apply_chat_template(shown, tools, add_generation_prompt=answered, tokenizer_kwargs=options)
    spans = spans["offset_mapping"]

    lead = list(takewhile(lambda message: message["role"] == "system", messages))
    # Found by comparison, so that templates which begin with a BOS or a default prompt need no rules of their own.
    opening, header = up_to_words(tokenizer, lead, tools), _user_header(tokenizer)
    apart = header is not None and opening.endswith(header)  # the system prompt stands before the turn
    anchor = opening.removesuffix(header) if apart else opening
    if not text.startswith(anchor):
        raise BadConversation("system prompt is not at the start of the chat", "its windows could not repeat it")
    starts = []
    for index in range(len(lead) + 1, len(messages) if header is not None else 0):
        try:
            before = render(tokenizer, messages[:index], tools)
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


def split_conversation(row: dict, encoded: dict, tokenizer, max_seq_len: int) -> list[dict[str, np.ndarray]]:
    """The windows of one chat; a chat of at most ``max_seq_len`` tokens is its own and only window.

    ``encoded``: what `encode_conversation` made of ``row``. See `cut_windows` for the result and the errors.
    """
    ids, mask = encoded["input_ids"], encoded["loss_mask"]
    if len(ids) <= max_seq_len:
        return [{"input_ids": np.array(ids, np.int32), "loss_mask": np.array(mask, np.int8)}]
    return cut_windows(ids, mask, *find_turns(row, tokenizer), max_seq_len)
