"""Chat rows to token ids and a loss mask, and a conversation file to a train/eval pair of datasets.

The mask marks what the target itself would generate: each assistant turn's text and the token that ends the turn.
It is found by rendering prefixes of the chat, so the chat template needs no ``{% generation %}`` markers.
"""

import hashlib
import json
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby, takewhile
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value
from jinja2 import TemplateError
from tqdm.auto import tqdm


TYPES = {"input_ids": List(Value("int32")), "loss_mask": List(Value("int8")), "prompt_length": Value("int32")}


class BadConversation(ValueError):
    """A row that cannot be trained on. ``reason`` is short and stable, to count by; ``str()`` adds the detail."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def clean_messages(row) -> list[dict]:
    """The row's messages without null keys and with every content a string. Raises BadConversation."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise BadConversation("no messages")
    cleaned = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadConversation("message is not an object", type(message).__name__)
        # A template that tests for a key would print the null, or an empty list of calls.
        message = {key: value for key, value in message.items() if value is not None and value != []}
        role, content = message.get("role"), message.get("content", "")
        if role not in ("system", "user", "assistant", "tool"):
            raise BadConversation("unknown role", repr(role))
        if "function_call" in message:
            raise BadConversation("legacy function_call")  # no template renders it: the call would vanish
        if isinstance(content, list):
            content = [part.get("text") if isinstance(part, dict) else part for part in content]
            content = "".join(content) if all(isinstance(text, str) for text in content) else None
        if not isinstance(content, str):
            raise BadConversation("content is not text", f"{role} message {index}")
        # An empty system, user or tool text says something; an empty answer does not. resp_ids replace the last one.
        answered = index == len(messages) - 1 and row.get("resp_ids") is not None
        absent = not content if role == "assistant" else "content" not in message
        if absent and "tool_calls" not in message and not answered:
            raise BadConversation("message without content", f"{role} message {index}")
        cleaned.append({**message, "content": content})
    if all(message["role"] != "assistant" for message in cleaned):
        raise BadConversation("no assistant turn")
    if cleaned[0]["role"] == "assistant":
        raise BadConversation("starts with an assistant turn")  # it has no prompt that could be rendered
    return cleaned


def render(tokenizer, messages: list[dict], tools, prompt: bool = False) -> str:
    """The chat template's text, with the generation prompt if ``prompt``; BadConversation where it refuses."""
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON may spell but no tokenizer takes
        raise BadConversation("text is not valid Unicode") from None
    except (TemplateError, TypeError, ValueError) as error:  # malformed tool calls fail as Python errors
        raise BadConversation("template refused", str(error)) from error
    return text


def _check_tools_rendered(tokenizer, messages: list[dict], tools, prompt: bool, text: str) -> None:
    """Raise BadConversation where ``text`` is the same without the tools or the tool calls: they would be lost."""
    bare = [{key: message[key] for key in message if key != "tool_calls"} for message in messages]
    for name, without in (("tool calls", (bare, tools)), ("tools", (messages, None))):
        try:
            ignored = without != (messages, tools) and render(tokenizer, *without, prompt) == text
        except BadConversation:  # it refuses the chat without them, so it does read them
            ignored = False
        if ignored:
            raise BadConversation(f"template ignores {name}")


def _turn_tokens(tokenizer, text: str, ids, spans, prompt: str, turn: str, stop_ids: set[int]) -> Iterable[int]:
    """Indices of one assistant turn's tokens in the whole chat: its ``text``, ``ids`` and their character ``spans``.

    ``prompt`` and ``turn`` are the chat rendered up to the turn (with generation prompt) and up to its end.
    """
    if not turn.startswith(prompt):  # a chat that parts from the turn before the prompt's end fails below
        raise BadConversation("template rewrites history")
    start = bisect_left(spans, len(prompt), key=lambda span: span[0])
    # A token across the prompt's end is not the target's own: the prompt alone ends in other tokens. A byte-level
    # tokenizer may report it without its leading spaces, as if it began after the prompt; the gap before it tells.
    if 0 < start < len(ids) and spans[start - 1][1] < len(prompt):
        start += tokenizer.convert_ids_to_tokens(ids[start]).startswith("Ġ")
    # Some templates end every rendering with an extra EOS, so only the turn up to its end token has to agree.
    whole = text.startswith(turn)
    end = len(turn) if whole else len(os.path.commonprefix([text, turn]))
    inside = [token for token in range(start, len(ids)) if spans[token][1] <= end]
    stop = next((token for token in inside if ids[token] in stop_ids), None)
    if stop is None and not whole:
        raise BadConversation("template rewrites history")
    return inside if stop is None else range(start, stop + 1)


def encode_conversation(row: dict, tokenizer, stop_token_ids: Collection[int] = ()) -> dict:
    """Token ids of one chat and the mask of the tokens that the target itself would generate.

    ``row``: ``messages`` in OpenAI format (roles system, user, assistant, tool; content a string, null or text parts),
    optionally ``tools`` (list of JSON schemas) and ``resp_ids`` (the exact tokens the target gave as the last
    assistant message; then only these are supervised, and they need not end with a stop token). ``stop_token_ids``:
    ids that end a turn besides the tokenizer's EOS (``generation_config.eos_token_id``; Gemma-3 has such a one).

    Returns ``input_ids``: list[int], exactly ``apply_chat_template(messages, tools=tools, tokenize=True)`` (with
    ``resp_ids``: the generation prompt's ids and then the answer's), and ``loss_mask``: list[int] of that length, 1
    on each assistant turn's text and on its end token, which is the first stop token of the turn, 0 elsewhere.
    Raises BadConversation (see its ``reason``) where the row cannot be used, and a plain ValueError where the
    tokenizer has no chat template or, being a slow one, no offsets.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} is a slow one without offsets; load the fast one")
    messages, tools, answer = clean_messages(row), row.get("tools") or None, row.get("resp_ids")
    tokenizer.get_chat_template(tools=tools)  # raises here, because a missing template is no fault of the row
    if answered := answer is not None:
        # type() because a bool is an int too; a negative id would index from the vocabulary's end.
        if not isinstance(answer, list) or not all(type(i) is int and 0 <= i < len(tokenizer) for i in answer):
            raise BadConversation("resp_ids is not a list of the tokenizer's ids")
        if messages.pop()["role"] != "assistant":
            raise BadConversation("resp_ids without a last assistant turn")

    text = render(tokenizer, messages, tools, prompt=answered)
    _check_tools_rendered(tokenizer, messages, tools, answered, text)
    # The template's own tokenisation: of this same text, and without a second BOS next to the template's.
    offsets = {"return_offsets_mapping": True, "verbose": False}
    encoded = tokenizer.apply_chat_template(messages, tools, add_generation_prompt=answered, tokenizer_kwargs=offsets)
    ids, spans = encoded["input_ids"], encoded["offset_mapping"]
    mask = [0] * len(ids)
    if answered:
        ids, mask, messages = ids + answer, mask + [1] * len(answer), []  # earlier answers count as context
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            chats = render(tokenizer, messages[:index], tools, True), render(tokenizer, messages[: index + 1], tools)
            for token in _turn_tokens(tokenizer, text, ids, spans, *chats, {tokenizer.eos_token_id, *stop_token_ids}):
                mask[token] = 1
    if not any(mask):
        raise BadConversation("no supervised token")
    return {"input_ids": ids, "loss_mask": mask}


def read_jsonl(path) -> Iterator[tuple[int, dict | BadConversation]]:
    """Yield (line number from 1, row), with a BadConversation as the row of a broken line.

    Takes BOMs and CRLF line ends, passes over blank lines. Raises OSError where the file cannot be read.
    """
    with Path(path).open("rb") as file:  # bytes, because text mode would stop at the first invalid UTF-8
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf")  # on any line, as joined files have it in the middle
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                fault = "invalid UTF-8" if isinstance(error, UnicodeDecodeError) else "invalid JSON"
                row = BadConversation(fault, str(error))
            if not isinstance(row, dict | BadConversation):
                row = BadConversation("row is not an object", type(row).__name__)
            yield number, row


def is_eval(row: dict, eval_fraction: float) -> bool:
    """Side by a hash of all before the first answer: other answers to it and longer versions share its side."""
    opening = list(takewhile(lambda message: message["role"] != "assistant", clean_messages(row)))
    digest = hashlib.sha256(json.dumps(opening, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") < eval_fraction * 2**64


def load_conversations(
    path, tokenizer, *, max_seq_len: int, eval_fraction: float, stop_token_ids: Collection[int] = (), progress=True
) -> tuple[Dataset, Dataset, Counter]:
    """Read, encode, de-duplicate and split a JSON Lines file of conversations.

    Keeps the first ``max_seq_len`` tokens of each. About ``eval_fraction`` (0 to 1) of them go to eval, by their own
    text, so that none changes sides when rows are added or moved. ``progress`` shows a bar, then the report.

    Returns (train, eval, report): columns ``input_ids`` (list of int32) and ``loss_mask`` (list of int8); eval has
    ``prompt_length`` (int32) too, the number of tokens before the first supervised one. ``report`` counts
    "read" = "train" + "eval" + all "skipped: <reason>"; "cut to max_seq_len" counts among the kept.
    Raises ValueError: an argument is out of range, the tokenizer is unfit, or nothing is left to train on.
    """
    if max_seq_len < 2 or not 0 <= eval_fraction <= 1:
        raise ValueError(f"need max_seq_len >= 2 and 0 <= eval_fraction <= 1, got {max_seq_len} and {eval_fraction}")
    sides = {side: {name: [] for name in TYPES} for side in ("train", "eval")}  # columns in the order of TYPES
    report, first, seen = Counter(), {}, set()
    for number, row in tqdm(read_jsonl(path), desc="conversations", unit=" rows", disable=not progress):
        report["read"] += 1
        try:
            if isinstance(row, BadConversation):
                raise row
            encoded = encode_conversation(row, tokenizer, stop_token_ids)
            ids = np.array(encoded["input_ids"][:max_seq_len], np.int32)  # a Python int takes 36 bytes in a list
            mask = np.array(encoded["loss_mask"][:max_seq_len], np.int8)
            if not mask.any():
                raise BadConversation("no supervised token within max_seq_len")
            digest = hashlib.sha256(ids.tobytes()).digest()  # chats that differ only after the cut are one sample
            if digest in seen:
                raise BadConversation("duplicate")
        except BadConversation as bad:
            report[f"skipped: {bad.reason}"] += 1
            first.setdefault(f"skipped: {bad.reason}", f" (first in line {number}: {bad})")
            continue
        seen.add(digest)
        side = "eval" if is_eval(row, eval_fraction) else "train"
        for column, value in zip(sides[side].values(), (ids, mask, int(mask.argmax())), strict=True):
            column.append(value)
        report.update([side] + ["cut to max_seq_len"] * (len(encoded["input_ids"]) > max_seq_len))

    assert report["read"] == report["train"] + report["eval"] + sum(report[reason] for reason in first), report
    counts = "; ".join(f"{count} {name}{first.get(name, '')}" for name, count in report.items())
    if progress:
        tqdm.write(f"{path}: {counts}")
    if not report["train"] and (not report["eval"] or eval_fraction < 1):
        raise ValueError(f"{path}: no conversation left to train on: {counts or 'the file is empty'}")
    train, evaluation = (Dataset.from_dict(columns, Features(TYPES)) for columns in sides.values())
    return train.remove_columns("prompt_length"), evaluation, report


def show_supervision(input_ids: Collection[int], loss_mask: Collection[int], tokenizer) -> str:
    """The decoded sample with each run of supervised tokens in ⟦ ⟧. Raises ValueError where the lengths differ."""
    shown = ""
    for supervised, run in groupby(zip(input_ids, loss_mask, strict=True), key=lambda pair: bool(pair[1])):
        text = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        shown += f"⟦{text}⟧" if supervised else text
    return shown


def check_masks(dataset: Dataset, tokenizer) -> None:
    """Raise ValueError, naming the tokenizer, where the dataset's ``loss_mask`` is all zero (or empty) or all one."""
    masks = [mask for batch in dataset.with_format("numpy").iter(256) for mask in batch["loss_mask"]]
    ones = sum(int(mask.sum()) for mask in masks)
    if ones in (0, sum(map(len, masks))):
        cause = f"the chat template of tokenizer {tokenizer.name_or_path!r} does not fit this data"
        raise ValueError(f"{len(dataset)} conversations supervise {'every' if ones else 'no'} token: {cause}")
