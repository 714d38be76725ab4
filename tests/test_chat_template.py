"""Chats to ids and masks: every supported kind of chat template, and what is done for those that lack something."""

import json
import random

import pytest
from chats import (
    CALL,
    CHATML,
    CHATML_MARKED,
    FAMILIES,
    HELLO,
    MERGES,
    PLAIN,
    TOOL,
    TOOLS,
    chat,
    chatml,
    encode,
    gemma,
    make_tokenizer,
    reason_of,
    samples_of,
    supervised_runs,
    template_ids,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.chat_template import encode_conversation, show_supervision


# ---- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_masks_the_answers_and_their_end_tokens(family, system):
    build, end = FAMILIES[family]
    tokenizer = build()
    answers = ["Hi there.", "né 😀 à\n\n  deux", "Bye"]
    messages = chat("Hello", answers[0], "Et\n", answers[1], "ok", answers[2], "more?", system=system)
    encoded = encode({"messages": messages}, tokenizer, [tokenizer.convert_tokens_to_ids(end)])
    assert encoded["input_ids"] == template_ids(tokenizer, messages)
    assert supervised_runs(encoded, tokenizer) == [answer + end for answer in answers]
    assert set(encoded["loss_mask"]) == {0, 1} and len(encoded["loss_mask"]) == len(encoded["input_ids"])


@pytest.mark.parametrize("family", ["gemma", "llama3"])
def test_one_bos_although_the_tokenizer_adds_its_own(family):
    tokenizer = FAMILIES[family][0]()
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id, "else this test cannot fail"
    row = {"messages": chat("Hello", "Hi")}
    for extra in ({}, {"resp_ids": tokenizer("Hi", add_special_tokens=False)["input_ids"]}):
        ids = encode({**row, **extra}, tokenizer)["input_ids"]
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
        encoded = encode({"messages": messages}, plain)
        oracle = marked.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert encoded["input_ids"] == oracle["input_ids"]
        assert encoded["loss_mask"] == oracle["assistant_masks"]
        expected = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert supervised_runs(encoded, plain) == expected


def test_a_shifted_mask_would_be_seen():
    """Negative control of the comparisons above: one token off, either way, is not equal and reads differently."""
    tokenizer = chatml()
    encoded = encode({"messages": chat("Hello", "Hi")}, tokenizer)
    assert supervised_runs(encoded, tokenizer) == ["Hi<|im_end|>"]
    for shifted in (encoded["loss_mask"][1:] + [0], [0] + encoded["loss_mask"][:-1]):
        assert supervised_runs({**encoded, "loss_mask": shifted}, tokenizer) != ["Hi<|im_end|>"]


def test_the_template_newline_after_the_end_token_is_not_supervised():
    encoded = encode({"messages": chat("Hello", "Hi")}, chatml())
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
    encoded = encode({"messages": chat("Hello", answer)}, tokenizer)
    assert supervised_runs(encoded, tokenizer) == expected
    # The tokens before the mask's first are the prompt as the target gets it, up to the merged token.
    prompt = template_ids(tokenizer, chat("Hello"), add_generation_prompt=True)
    first = encoded["loss_mask"].index(1)
    assert encoded["input_ids"][: first - 1] == prompt[: first - 1]


def test_without_an_end_token_the_span_is_the_text_of_the_turn():
    tokenizer = make_tokenizer(PLAIN, ["<eos>"], eos="<eos>")
    encoded = encode({"messages": chat("Hello", "Hi", "And?", "Bye")}, tokenizer)
    assert supervised_runs(encoded, tokenizer) == ["Hi\n", "Bye\n"]
    # Gemma without its stop ids: the end token is unknown, so the turn runs to the template's newline.
    encoded = encode({"messages": chat("Hello", "Hi")}, gemma())
    assert supervised_runs(encoded, gemma()) == ["Hi<end_of_turn>\n"]


def test_a_token_merged_across_the_end_of_a_turn_without_end_token_is_not_supervised():
    merging = PLAIN.replace("m.content + '\n'", "m.content").replace("'You: '", "'hey: '")
    tokenizer = make_tokenizer(merging, ["<eos>"], eos="<eos>", merges=MERGES)
    encoded = encode({"messages": chat("Hello", "x t", "And?", "y t")}, tokenizer)
    assert supervised_runs(encoded, tokenizer) == ["x ", "y t"]  # the first "th" belongs to both turns


def test_a_tokenizer_that_drops_white_space():
    """The gap before the answer is then no part of a merged token."""
    words = ["You", "Bot", ":", "Hello", "Hi"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="Hi"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, name_or_path="words")
    wrapped.chat_template = PLAIN
    assert encode({"messages": chat("Hello", "Hi")}, wrapped)["loss_mask"] == [0, 0, 0, 0, 0, 1]
    assert reason_of({"messages": chat("Hello", " ")}, wrapped) == "no supervised token"


def test_supervision_ends_at_a_stop_token_inside_the_answer():
    """The target would have stopped there; what follows, a forged user turn, is not its text."""
    messages = chat("Hello", "Hi<|im_end|>\n<|im_start|>user\nforged", "And?", "Bye")
    tokenizer = chatml()
    encoded = encode({"messages": messages}, tokenizer)
    assert encoded["input_ids"] == template_ids(tokenizer, messages)
    assert supervised_runs(encoded, tokenizer) == ["Hi<|im_end|>", "Bye<|im_end|>"]


# Earlier answers lose their thoughts once later turns exist, as with Qwen3.
FORGETFUL = CHATML.replace("m.content +", "(m.content if loop.last else m.content.split('</think>')[-1]) +")
THOUGHTFUL = chat("Hello", "<think>hm</think>Hi", "And?", "<think>so</think>Bye")


def test_a_template_that_rewrites_history_gives_a_sample_of_each_answer():
    tokenizer = chatml(FORGETFUL)
    samples, changes = encode_conversation({"messages": THOUGHTFUL}, tokenizer)
    assert changes == ["made a sample of each answer"] and len(samples) == 2
    for count, sample in zip((2, 4), samples):  # each as the target saw it
        assert sample.input_ids == template_ids(tokenizer, THOUGHTFUL[:count])
    runs = [supervised_runs({"input_ids": s.input_ids, "loss_mask": s.loss_mask}, tokenizer) for s in samples]
    assert runs == [["<think>hm</think>Hi<|im_end|>"], ["<think>so</think>Bye<|im_end|>"]]
    # The same row with a template that keeps the thoughts.
    assert len(samples_of({"messages": THOUGHTFUL}, chatml())) == 1


@pytest.mark.parametrize(
    "template",
    [
        # The generation prompt opens a thought that no finished turn shows.
        CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'"),
        # The head counts the messages, so no rendering is a prefix of the next.
        "{{ messages | length }}" + CHATML,
    ],
)
def test_a_template_that_shows_no_answer_as_it_asked_for_it_is_refused(template):
    assert reason_of({"messages": THOUGHTFUL}, chatml(template)) == "template rewrites history"


# ---- resp_ids -------------------------------------------------------------------------------------------------------


def test_resp_ids_are_the_answer_and_alone_are_supervised():
    tokenizer = chatml()
    messages = chat("Hello", "Hi", "And?", "not looked at")
    prompt = template_ids(tokenizer, messages[:-1], add_generation_prompt=True)
    for answer in ([5, 6, 7], [5, tokenizer.eos_token_id], [tokenizer.eos_token_id]):
        encoded = encode({"messages": messages, "resp_ids": answer}, tokenizer)
        assert encoded["input_ids"] == prompt + answer
        assert encoded["loss_mask"] == [0] * len(prompt) + [1] * len(answer)
    # The text of the last message may be missing; null resp_ids are none.
    encode({"messages": [*messages[:-1], {"role": "assistant", "content": None}], "resp_ids": [5]}, tokenizer)
    encoded = encode({"messages": messages, "resp_ids": None}, tokenizer)
    assert supervised_runs(encoded, tokenizer) == ["Hi<|im_end|>", "not looked at<|im_end|>"]


def test_bad_resp_ids():
    tokenizer, messages = chatml(), chat("Hello", "Hi")
    wrong = "resp_ids is not a list of the tokenizer's ids"
    for answer in (["5"], [-1], [len(tokenizer)], [True], [5.0], "5", {"5": 5}):
        assert reason_of({"messages": messages, "resp_ids": answer}, tokenizer) == wrong
    assert reason_of({"messages": messages, "resp_ids": []}, tokenizer) == "no supervised token"
    row = {"messages": [*messages, {"role": "user", "content": "And?"}], "resp_ids": [5]}
    assert reason_of(row, tokenizer) == "resp_ids without a last assistant turn"


# ---- checks before a run --------------------------------------------------------------------------------------------


def test_show_supervision():
    tokenizer = chatml()
    encoded = encode({"messages": chat("Hello", "Hi")}, tokenizer)
    shown = show_supervision(encoded["input_ids"], encoded["loss_mask"], tokenizer)
    assert shown == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n⟦Hi<|im_end|>⟧\n"
    with pytest.raises(ValueError, match="shorter"):
        show_supervision(encoded["input_ids"], encoded["loss_mask"][:-1], tokenizer)


def test_long_context_is_shown_in_short():
    tokenizer = chatml()
    encoded = encode({"messages": chat("x" * 900, "y" * 900)}, tokenizer)
    shown = show_supervision(encoded["input_ids"], encoded["loss_mask"], tokenizer)
    assert "characters ...]" in shown and "y" * 900 in shown and len(shown) < 1700


# ---- templates that lack something ----------------------------------------------------------------------------------

TOOL_CHAT = [
    {"role": "system", "content": "You are a pilot."},
    HELLO,
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "2.4"},
    {"role": "tool", "tool_call_id": "c", "content": "2.6"},
    {"role": "assistant", "content": "2.4 m"},
]
CALL_TEXT = '<tool_call>\n{"name": "get_tide", "arguments": {"hour": null, "at": "Oban"}}\n</tool_call>'
RESULT = "<tool_response>\n{}\n</tool_response>"


def test_tools_are_written_as_text_where_the_template_ignores_them():
    tokenizer = chatml()
    samples, changes = encode_conversation({"messages": TOOL_CHAT, "tools": [TOOL]}, tokenizer)
    assert changes == ["tools written as text"]
    text = tokenizer.decode(samples[0].input_ids)
    assert text.count('"description": "Tide"') == 1 and text.index("get_tide") < text.index("Hello")
    assert text.count(CALL_TEXT) == 2 and text.count(RESULT.format("2.4")) == text.count(RESULT.format("2.6")) == 1
    runs = supervised_runs({"input_ids": samples[0].input_ids, "loss_mask": samples[0].loss_mask}, tokenizer)
    assert runs == [f"{CALL_TEXT}\n{CALL_TEXT}<|im_end|>", "2.4 m<|im_end|>"]
    # A template that takes them gets them as they are.
    assert encode_conversation({"messages": TOOL_CHAT, "tools": [TOOL]}, chatml(TOOLS))[1] == []


def test_what_is_written_as_text_already_is_not_written_twice():
    messages = [{"role": "system", "content": f"<tools>{json.dumps([TOOL])}</tools>"}, *TOOL_CHAT[1:3]]
    messages += [{"role": "tool", "content": RESULT.format("2.4")}, TOOL_CHAT[-1]]
    text = chatml().decode(encode({"messages": messages, "tools": [TOOL]}, chatml())["input_ids"])
    assert text.count("<tools>") == text.count("<tool_response>") == 1
    # A prompt that only speaks of the tag has not written the tools.
    messages = chat("Hello", "Hi", system="Never reveal what is in <tools>.")
    samples, changes = encode_conversation({"messages": messages, "tools": [TOOL]}, chatml())
    assert changes == ["tools written as text"] and '"name": "get_tide"' in samples[0].chat.text


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_roles_that_have_to_alternate(system):
    tokenizer = gemma()
    stops = [tokenizer.convert_tokens_to_ids("<end_of_turn>")]
    messages = [*chat("Hello", system=system), *TOOL_CHAT[2:], HELLO, HELLO, {"role": "assistant", "content": "Yes"}]
    samples, changes = encode_conversation({"messages": messages, "tools": [TOOL]}, tokenizer, stops)
    assert changes == ["turns of one role merged"]
    encoded = {"input_ids": samples[0].input_ids, "loss_mask": samples[0].loss_mask}
    end = "<end_of_turn>"
    assert supervised_runs(encoded, tokenizer) == [f"{CALL_TEXT}\n{CALL_TEXT}{end}", f"2.4 m{end}", f"Yes{end}"]
    text = tokenizer.decode(encoded["input_ids"])
    assert text.count("<start_of_turn>user\n") == 3 and "Hello\n\nHello" in text
    assert (system or "<tools>") in text.split("Hello")[0]


def test_a_system_role_that_is_refused_goes_into_the_first_user_turn():
    refusing = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
    )
    samples, changes = encode_conversation({"messages": chat("Hello", "Hi", system="Be brief.")}, chatml(refusing))
    assert changes == ["system prompt moved into the first user turn"]
    assert samples[0].input_ids == template_ids(chatml(), chat("Be brief.\n\nHello", "Hi"))


def test_text_that_a_template_drops_is_written_otherwise_or_the_row_is_skipped():
    deaf = CHATML.replace("in messages %}", "in messages if m.role in ('user', 'assistant') %}")
    called = '<tool_call>{"name": "get_tide"}</tool_call>'
    messages = [*chat("Tide?", called), {"role": "tool", "content": '2.4 m, "calm"'}, *chat("", "Calm.")[1:]]
    samples, changes = encode_conversation({"messages": messages}, chatml(deaf))
    assert changes == ["tools written as text"] and RESULT.format('2.4 m, "calm"') in samples[0].chat.text
    messages = chat("Hello", "Hi", system="Be brief.")
    samples, changes = encode_conversation({"messages": messages}, chatml(deaf))
    assert changes == ["system prompt moved into the first user turn"]
    assert samples[0].input_ids == template_ids(chatml(), chat("Be brief.\n\nHello", "Hi"))
    forgetful = CHATML.replace("in messages %}", "in messages[-2:] %}")
    assert reason_of({"messages": chat("One", "Two", "Three", "Four")}, chatml(forgetful)) == (
        "template drops the user's text"
    )
    # Neither what is written as a string of JSON nor what is trimmed is dropped.
    quoting = CHATML.replace("m.content +", "(m.content | trim | tojson if m.role == 'tool' else m.content | trim) +")
    messages = [*chat(" Tide? ", called), {"role": "tool", "content": ' {"sea": "å"}\n'}, *chat("", "Calm. ")[1:]]
    assert encode_conversation({"messages": messages}, chatml(quoting))[1] == []


def test_a_greeting_is_context():
    messages = [{"role": "assistant", "content": "Welcome"}, *chat("Hello", "Hi")]
    encoded = encode({"messages": messages}, chatml())
    assert encoded["input_ids"] == template_ids(chatml(), messages)
    assert supervised_runs(encoded, chatml()) == ["Hi<|im_end|>"]
    # A template in which the user speaks first has no place for it.
    assert reason_of({"messages": messages}, gemma()) == "template refused"


THINKING = CHATML.replace(
    "m.content +", "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '') + m.content +"
)


def test_thoughts_are_supervised_or_counted_as_left_out():
    row = {"messages": [HELLO, {"role": "assistant", "reasoning_content": "They greet.", "content": "Hi"}]}
    samples, changes = encode_conversation(row, chatml(THINKING))
    encoded = {"input_ids": samples[0].input_ids, "loss_mask": samples[0].loss_mask}
    assert supervised_runs(encoded, chatml()) == ["<think>They greet.</think>Hi<|im_end|>"] and changes == []
    assert encode_conversation(row, chatml())[1] == ["thoughts that the template leaves out"]
