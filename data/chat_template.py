"""Conversations to token ids, as the target's chat template writes them, with a mask of what the target would generate.

The mask marks each assistant turn's text and the token that ends the turn. It is found by rendering prefixes of the chat,
so the template needs no ``{% generation %}`` markers. Templates that lack something a chat has are met by a fixed rule, in
this order, and each step is counted (`FALLBACKS`): tools, calls and results are written as text; neighbouring turns of one
role become one; the system prompt goes into the first user turn. A template without a place for `reasoning_content` leaves it
out, which is counted, too: the target does not write it either. A template that shows earlier answers otherwise than it
asked for them (Qwen3 drops thoughts) makes one sample of each answer, in which the chat stands as the target saw it.
"""

import json
import os
from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import groupby

from jinja2 import TemplateError

from data.conversations import BadConversation, read_conversation


# Key of a user message that begins with the system prompt: that prompt. No template reads it.
MOVED = "moved_system_prompt"


def render(tokenizer, messages: list[dict], tools, prompt: bool = False) -> str:
    """The chat template's text, with the generation prompt if ``prompt``; BadConversation where it refuses."""
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON may spell but no tokenizer takes
        raise BadConversation("text is not valid Unicode") from None
    except (
        TemplateError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # malformed tool calls fail as Python errors
        raise BadConversation("template refused", str(error)) from error
    return text


def is_named(tool: dict, text: str) -> bool:
    match tool:
        case {"function": {"name": str(name)}}:
            return name in text
    return False


def tools_as_text(messages: list[dict], tools) -> tuple[list[dict], None]:
    """Tools, calls and results written into plain turns, with the tags that Hermes and Qwen models were trained on."""
    plain = []
    for message in messages:
        role, content = message["role"], message["content"]
        if message.get("tool_calls"):
            calls = (json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"])
            content = "\n".join([content] * bool(content) + [f"<tool_call>\n{call}\n</tool_call>" for call in calls])
        if role == "tool":
            role = "user"
            if "<tool_response>" not in content:  # as with the tools below
                content = f"<tool_response>\n{content}\n</tool_response>"
        kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        plain.append({**kept, "role": role, "content": content})
    lead = plain[0]["content"].partition("<tools>")[2] if plain[0]["role"] == "system" else ""
    # What is there already was written so by whoever wrote the log.
    if tools and not all(is_named(tool, lead) for tool in tools):
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = (
            f"These functions can be called, by their name and arguments as JSON between <tool_call> and </tool_call>:\n"
            f"<tools>\n{schemas}\n</tools>"
        )
        if plain[0]["role"] == "system":
            plain[0]["content"] += f"\n\n{text}"
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain, None


def roles_merged(messages: list[dict], tools) -> tuple[list[dict], None]:
    """Neighbouring messages of one role as one; a system message after the first turn speaks as the user."""
    merged = []
    for message in tools_as_text(messages, tools)[0]:
        if message["role"] == "system" and any(other["role"] != "system" for other in merged):
            message["role"] = "user"
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1]["content"] += f"\n\n{message['content']}"
        else:
            merged.append(message)
    return merged, None


def system_in_user(messages: list[dict], tools) -> tuple[list[dict], None]:
    """The system prompt as the beginning of the first user turn."""
    merged = roles_merged(messages, tools)[0]
    if len(merged) > 1 and (merged[0]["role"], merged[1]["role"]) == ("system", "user"):
        lead = merged.pop(0)["content"] + "\n\n"
        merged[0] |= {"content": lead + merged[0]["content"], MOVED: lead}
    return merged, None


# What is tried in turn where a template refuses a chat or leaves something out, under the name in the report.
FALLBACKS = {
    "tools written as text": tools_as_text,
    "turns of one role merged": roles_merged,
    "system prompt moved into the first user turn": system_in_user,
}


class Chat:
    """One conversation as the chat template writes it.

    Args:
        messages, tools: As of `read_conversation`.
        prompt (`bool`): End with the generation prompt; ``asks`` says so.

    Attributes: ``text`` (str), its token ids ``ids`` (list[int]) and their character ``spans`` (list of pairs). Raises
    BadConversation where the template refuses it, or leaves out the tools, the tool calls or the text of a message.
    """

    def __init__(self, tokenizer, messages: list[dict], tools, prompt: bool = False):
        self.tokenizer, self.messages, self.tools, self.asks = tokenizer, messages, tools, prompt
        self.text = render(tokenizer, messages, tools, prompt)
        bare = [{key: message[key] for key in message if key != "tool_calls"} for message in messages]
        for name, without in (("tool calls", (bare, tools)), ("tools", (messages, None))):
            try:
                ignored = without != (messages, tools) and render(tokenizer, *without, prompt) == self.text
            except BadConversation:  # it refuses the chat without them, so it does read them
                ignored = False
            if ignored:
                raise BadConversation(f"template ignores {name}")
        for message in messages:
            words = message["content"].rpartition("</think>")[2].strip()  # earlier thoughts may be dropped
            if words not in self.text and json.dumps(words, ensure_ascii=False)[1:-1] not in self.text:
                raise BadConversation(f"template drops the {message['role']}'s text", words)
        # As the template's own tokenisation: without a second BOS next to the template's.
        encoded = tokenizer(self.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        self.ids, self.spans = encoded["input_ids"], encoded["offset_mapping"]
        self.prefixes, self.prompts = {} if prompt else {len(messages): self.text}, {}

    def until(self, count: int) -> str:
        """The text of the chat's first ``count`` messages alone."""
        if count not in self.prefixes:
            prefix = render(self.tokenizer, self.messages[:count], self.tools)
            # All prefixes of a chat of many turns would take much memory, and nearly all are parts of its text.
            self.prefixes[count] = len(prefix) if self.text.startswith(prefix) else prefix
        prefix = self.prefixes[count]
        return self.text[:prefix] if isinstance(prefix, int) else prefix

    def prompt(self, count: int) -> str:
        """What the target is shown to answer the first ``count`` messages."""
        if count not in self.prompts:
            # Nearly all templates write one same header, so that one rendering less does for all but the first answer.
            for earlier, prompt in self.prompts.items():
                header = prompt.removeprefix(self.until(earlier))
                if prompt.startswith(self.until(earlier)) and self.text.startswith(self.until(count) + header):
                    return self.until(count) + header
            self.prompts[count] = render(self.tokenizer, self.messages[:count], self.tools, prompt=True)
        return self.prompts[count]

    def answer(self, index: int, stop_ids: Collection[int]) -> Iterable[int]:
        """Indices into ``ids`` of what the target generates for the assistant message ``index``, its end token included.

        Raises BadConversation where the whole chat does not show the turn as it was asked for.
        """
        prompt, turn = self.prompt(index), self.until(index + 1)
        if not turn.startswith(prompt):  # a chat that parts from the turn before the prompt's end fails below
            raise BadConversation("template rewrites history")
        start = bisect_left(self.spans, len(prompt), key=lambda span: span[0])
        # A token across the prompt's end is not the target's own: the prompt alone ends in other tokens. A byte-level
        # tokenizer may report it without its leading spaces, as if it began after the prompt; the gap before it tells.
        if 0 < start < len(self.ids) and self.spans[start - 1][1] < len(prompt):
            start += self.tokenizer.convert_ids_to_tokens(self.ids[start]).startswith("Ġ")
        # Some templates end every rendering with an extra EOS, so only the turn up to its end token has to agree.
        whole = self.text.startswith(turn)
        end = len(turn) if whole else len(os.path.commonprefix([self.text, turn]))
        inside = []
        for token in range(start, len(self.ids)):
            if self.spans[token][1] > end:
                break
            inside.append(token)
            if self.ids[token] in stop_ids:
                return inside
        if not whole:
            raise BadConversation("template rewrites history")
        return inside


@dataclass
class Sample:
    """A chat to train on: ``input_ids`` (list[int]), ``loss_mask`` (list[int] of that length) and its [`Chat`], whose
    tokens come first (the target's exact answer may follow)."""

    input_ids: list[int]
    loss_mask: list[int]
    chat: Chat


def fit_template(tokenizer, messages: list[dict], tools, prompt: bool) -> tuple[Chat, str | None]:
    """The chat, and the first of FALLBACKS with which the template takes it (None: as it is).

    Raises BadConversation, that of the chat as it is, where none helps.
    """
    try:
        return Chat(tokenizer, messages, tools, prompt), None
    except BadConversation as bad:
        if not bad.reason.startswith("template"):
            raise
        for name, rewrite in FALLBACKS.items():
            rewritten = rewrite(messages, tools)
            if rewritten == (messages, tools):
                continue
            try:
                return Chat(tokenizer, *rewritten, prompt), name
            except BadConversation:
                continue
        raise


def encode_conversation(row: dict, tokenizer, stop_token_ids: Collection[int] = ()) -> tuple[list[Sample], list[str]]:
    """Samples of one chat: token ids and the mask of the tokens that the target itself would generate.

    ``row``: see `read_conversation`; it may have ``resp_ids``, the exact tokens that the target gave as the last assistant
    message; then only these are supervised, and they need not end with a stop token. ``stop_token_ids``: ids that end a
    turn besides the tokenizer's EOS (``generation_config.eos_token_id``; Gemma-3 has such a one).

    Returns the samples, one but for templates that rewrite history, and what was done to fit the template, for the report.
    The ids are exactly ``apply_chat_template(messages, tools=tools, tokenize=True)`` of the fitted messages (with
    ``resp_ids``: the generation prompt's ids and then the answer's). ``loss_mask`` is 1 on each assistant turn's text and on
    its end token, which is the first stop token of the turn, 0 elsewhere. Raises BadConversation (see its ``reason``) where
    the row cannot be used, and a plain ValueError where the tokenizer has no chat template or, being a slow one, no offsets.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} is a slow one without offsets; load the fast one")
    messages, tools = read_conversation(row)
    tokenizer.get_chat_template(tools=tools)  # raises here, because a missing template is no fault of the row
    stop_ids = {tokenizer.eos_token_id, *stop_token_ids}
    answer = row.get("resp_ids")
    if answer is not None:
        # type() because a bool is an int too; a negative id would index from the vocabulary's end.
        if not isinstance(answer, list) or not all(type(i) is int and 0 <= i < len(tokenizer) for i in answer):
            raise BadConversation("resp_ids is not a list of the tokenizer's ids")
        if messages.pop()["role"] != "assistant":
            raise BadConversation("resp_ids without a last assistant turn")
        if not (messages and answer):
            raise BadConversation("no supervised token" if messages else "starts with an assistant turn")
    chat, change = fit_template(tokenizer, messages, tools, prompt=answer is not None)
    changes = [change] if change else []
    if answer is not None:  # earlier answers count as context
        return [Sample(chat.ids + answer, [0] * len(chat.ids) + [1] * len(answer), chat)], changes
    try:
        samples = [supervise(chat, answers(chat), stop_ids)]
    except BadConversation as bad:
        if bad.reason != "template rewrites history":
            raise
        samples = []
        for index in answers(chat):
            shown = Chat(tokenizer, chat.messages[: index + 1], chat.tools)
            samples.append(supervise(shown, [index], stop_ids))
        changes.append("made a sample of each answer")
    samples = [sample for sample in samples if any(sample.loss_mask)]
    if not samples:
        raise BadConversation("no supervised token")
    thoughts = (str(message.get("reasoning_content", "")).strip() for message in messages)
    if any(all(thought not in sample.chat.text for sample in samples) for thought in thoughts):
        changes.append("thoughts that the template leaves out")
    return samples, changes


def answers(chat: Chat) -> list[int]:
    """Indices of the assistant messages that answer something: a greeting before the first user turn has no prompt."""
    asked = next((i for i, message in enumerate(chat.messages) if message["role"] == "user"), len(chat.messages))
    indices = [i for i, message in enumerate(chat.messages) if i > asked and message["role"] == "assistant"]
    if not indices:
        raise BadConversation("no assistant turn after a user turn")
    return indices


def supervise(chat: Chat, indices: list[int], stop_ids: Collection[int]) -> Sample:
    mask = [0] * len(chat.ids)
    for index in indices:
        for token in chat.answer(index, stop_ids):
            mask[token] = 1
    return Sample(chat.ids, mask, chat)


def show_supervision(input_ids: Collection[int], loss_mask: Collection[int], tokenizer, longest: int = 600) -> str:
    """The decoded sample with each run of supervised tokens in ⟦ ⟧, of others at most ``longest`` characters each. Raises
    ValueError where the lengths differ."""
    shown = ""
    for supervised, run in groupby(zip(input_ids, loss_mask, strict=True), key=lambda pair: bool(pair[1])):
        text = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        if not supervised and len(text) > longest:
            text = f"{text[: longest // 2]}[... {len(text) - longest} characters ...]{text[-longest // 2 :]}"
        shown += f"⟦{text}⟧" if supervised else text
    return shown
