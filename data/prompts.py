"""Prompt files to token ids: what evaluate_peagle.py asks the models to answer."""

from collections import Counter

from jinja2 import TemplateError

from data.conversations import BadConversation, read_jsonl, read_rows
from data.windows import Report, read_windows
from target_peagle import stop_token_ids


# What training takes unless told otherwise: its blocks' length, and the share of the conversations that it holds out.
MAX_SEQ_LEN, EVAL_FRACTION = 512, 0.05


def read_prompts(path, tokenizer) -> list[dict]:
    """Prompts with `id` (str), `category` (str) and `input_ids` (list[int]), from JSON Lines.

    A row has `messages` (in OpenAI format, `tools` if need be), a `prompt`, or `turns` (as in Spec-Bench, the
    first is asked), and may have a `category` and an `id` or `question_id`. Raises ValueError naming a bad row's line.
    """
    tokenizer.get_chat_template()  # raises here, because a missing template is no fault of a row
    prompts = []
    for number, row in read_jsonl(path):
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
        prompts.append({"id": name, "category": str(row.get("category", "none")), "input_ids": chat["input_ids"]})
    return prompts


def held_out_prompts(path, tokenizer, target, eval_fraction: float) -> list[dict]:
    """The prompts of the conversations that train_peagle.py holds out of `path`; see [`read_prompts`]."""
    split = {"max_seq_len": MAX_SEQ_LEN, "eval_fraction": eval_fraction}
    split["stop_token_ids"] = stop_token_ids(target.generation_config)
    chats = read_windows(read_rows(path), tokenizer, Report(), {}, **split)
    held_out = [windows[0] for _, side, windows in chats if side == "eval" and windows[0]["loss_mask"].any()]
    prompts = [window["input_ids"][: window["loss_mask"].argmax()].tolist() for window in held_out]
    return [{"id": f"held-out-{i}", "category": "held-out", "input_ids": ids} for i, ids in enumerate(prompts)]


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
