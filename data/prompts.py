"""Prompt files to token ids: what evaluate_peagle.py asks the models to answer, and whether training has seen it."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

from jinja2 import TemplateError

from data.conversations import BadConversation, is_eval, read_conversation, read_rows
from data.windows import Report, read_windows
from target_peagle import stop_token_ids


# What training takes unless told otherwise: its blocks' length, and the share of the conversations that it holds out.
MAX_SEQ_LEN, EVAL_FRACTION = 512, 0.05
RUN = 13  # words in a row that two texts hardly share by chance


def read_prompts(path, tokenizer) -> list[dict]:
    """Prompts with `id` (str), `category` (str), `input_ids` (list[int]) and `messages`, from all that `read_rows` reads.

    A row has `messages` (in OpenAI format, `tools` if need be), a `prompt`, or `turns` (as in Spec-Bench, the
    first is asked), and may have a `category` and an `id` or `question_id`. Raises ValueError naming a bad row's line.
    """
    tokenizer.get_chat_template()  # raises here, because a missing template is no fault of a row
    prompts = []
    for number, row in read_rows(path):
        try:
            match row:
                case BadConversation():
                    raise row
                case {"messages": [*_, {"role": str(role)}] as messages} if role != "assistant":
                    # Some templates would print a null as the word None.
                    messages = [message | {"content": message.get("content") or ""} for message in messages]
                case {"prompt": str(text)} | {"turns": [str(text), *_]} if text:
                    messages = [{"role": "user", "content": text}]
                case _:
                    raise ValueError("need `messages` that end before an assistant's turn, a `prompt`, or `turns`")
            chat = tokenizer.apply_chat_template(messages, tools=row.get("tools"), add_generation_prompt=True)
        except (TemplateError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        name = str(row.get("id", row.get("question_id", f"line {number}")))
        prompt = {"id": name, "category": str(row.get("category", "none")), "input_ids": chat["input_ids"]}
        prompts.append(prompt | {"messages": messages})
    return prompts


def held_out_prompts(path, tokenizer, target, eval_fraction: float) -> list[dict]:
    """The prompts of the conversations that train_peagle.py holds out of `path`; see [`read_prompts`]."""
    split = {"max_seq_len": MAX_SEQ_LEN, "eval_fraction": eval_fraction}
    split["stop_token_ids"] = stop_token_ids(target.generation_config)
    chats = read_windows(read_rows(path), tokenizer, Report(), {}, **split)
    held_out = {n: windows[0] for n, side, windows in chats if side == "eval" and windows[0]["loss_mask"].any()}
    prompts = []
    for number, row in read_rows(path):
        if number in held_out:
            ids, mask = held_out[number]["input_ids"], held_out[number]["loss_mask"]
            prompt = {
                "id": f"held-out-{len(prompts)}",
                "category": "held-out",
                "input_ids": ids[: mask.argmax()].tolist(),
            }
            asked = takewhile(lambda message: message["role"] != "assistant", read_conversation(row)[0])
            prompts.append(prompt | {"messages": list(asked)})
    return prompts


def load_prompts(
    path,
    held_out_file,
    tokenizer,
    target,
    num_prompts: int | None = None,
    per_category: int | None = None,
    eval_fraction: float = EVAL_FRACTION,
) -> list[dict]:
    """The prompts of `path` or, if that is given, of `held_out_file`; see [`read_prompts`] and [`held_out_prompts`].

    Keeps the first `per_category` of each category, in the file's order, and of those the first `num_prompts`. Raises
    ValueError where none is left.
    """
    prompts = (
        held_out_prompts(held_out_file, tokenizer, target, eval_fraction)
        if held_out_file
        else read_prompts(path, tokenizer)
    )
    seen, kept = Counter(), []
    for prompt in prompts:
        seen[prompt["category"]] += 1
        if per_category is None or seen[prompt["category"]] <= per_category:
            kept.append(prompt)
    kept = kept if num_prompts is None else kept[: max(num_prompts, 0)]
    if not kept:
        raise ValueError(f"No prompt is left to answer of the {len(prompts)} in {held_out_file or path}.")
    return kept


def words_of(text: str) -> tuple[str, ...]:
    """What two texts are compared by: letters and digits alone, in lower case."""
    return tuple(re.findall(r"\w+", text.lower()))


def marks_of(messages: list[dict]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What tells a chat: its first user turn, and every run of `RUN` words within a message. Many share a system prompt."""
    said = [
        (message["role"], words_of(str(message["content"]))) for message in messages if message["role"] != "system"
    ]
    yield from [("first_turn", words) for role, words in said if role == "user"][:1]
    for _, words in said:
        yield from (("run_of_words", words[i : i + RUN]) for i in range(len(words) - RUN + 1))


def overlap(prompts: list[dict], files: list[str], eval_fraction: float) -> dict:
    """Which `prompts` the training conversations in `files` (see `read_rows`) have as well.

    A prompt counts if its first user turn has the words of a conversation's first user turn, or if one of its messages
    shares `RUN` words in a row with any of theirs, system prompts aside. What training held out by `eval_fraction` is not
    looked at.

    Returns the `files`, how many `conversations` were compared, the ids (list[str]) by `first_turn` and by `run_of_words`,
    and, of both, the ids `prompts` and their `count`.
    """
    marks = {}
    for prompt in prompts:
        for mark in marks_of(prompt["messages"]):
            marks.setdefault(mark, set()).add(prompt["id"])
    found, conversations = {"first_turn": set(), "run_of_words": set()}, 0
    for file in files:
        for _, row in read_rows(file):
            try:
                messages, _ = read_conversation(row)
            except BadConversation:  # training skips it, too
                continue
            if is_eval(messages, eval_fraction):
                continue
            conversations += 1
            for mark in marks_of(messages):
                found[mark[0]] |= marks.get(mark, set())
    ids = {kind: [p["id"] for p in prompts if p["id"] in names] for kind, names in found.items()}
    shared = [p["id"] for p in prompts if any(p["id"] in names for names in found.values())]
    return {"files": files, "conversations": conversations} | ids | {"prompts": shared, "count": len(shared)}
