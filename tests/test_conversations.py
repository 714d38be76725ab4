"""Rows of every shape to one form, bad rows, files, and the real data."""

import json
from collections import Counter

import pytest
from chats import (
    CALL,
    CHATML,
    HELLO,
    TOOL,
    TOOLS,
    chat,
    chatml,
    encode,
    gemma,
    reason_of,
    shared,
    supervised_runs,
    template_ids,
    write,
)
from transformers import PreTrainedTokenizerFast

from data.chat_template import encode_conversation
from data.conversations import BadConversation, read_conversation, read_jsonl
from data.sequence_packing import pack_file


def load(path, tokenizer, max_seq_len=512, eval_fraction=0.3, **options):
    """The documents of each side, as tuples of ids, and the counts."""
    options = {"progress": False, **options}
    blocks, report = pack_file(path, tokenizer, max_seq_len=max_seq_len, eval_fraction=eval_fraction, **options)
    sides = []
    for side in ("train", "eval"):
        found = []
        for block in blocks[side]:
            ids = iter(block["input_ids"])
            found += [tuple(next(ids) for _ in range(length)) for length in block["seq_lengths"]]
        sides.append(found)
    return *sides, report.counts


def asking(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "get_tide", "arguments": arguments}}]}


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
        ({"messages": [{"role": "assistant", "content": "Hi"}, HELLO]}, "no assistant turn after a user turn"),
        ({"messages": [HELLO, {"role": "narrator", "content": "Hi"}]}, "unknown role"),
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
        ({"messages": [HELLO, {"role": "assistant", "content": "", "function_call": {}}]}, "tool call without a name"),
        ({"messages": chat("Hello", "half a pair: \ud83d")}, "text is not valid Unicode"),
        ({"messages": chat("Hello", "Hi"), "tools": "get_tide"}, "tools are not a list of schemas"),
        ({"messages": chat("Hello", "Hi"), "tools": [7]}, "tools are not a list of schemas"),
        ({"messages": [HELLO, {"role": "assistant", "content": None, "tool_calls": 7}]}, "tool calls are not a list"),
        ({"messages": [HELLO, {"role": "assistant", "tool_calls": [7]}]}, "tool call without a name"),
        ({"messages": [HELLO, asking('{"hour": 12')]}, "tool call arguments are not JSON"),
        ({"messages": [HELLO, asking("[12]")]}, "tool call arguments are not JSON"),
    ],
)
def test_bad_rows(row, reason):
    assert reason_of(row, chatml(TOOLS)) == reason


def test_a_refusing_template_says_why():
    refusing = CHATML.replace("{% for m in messages %}", "{{ raise_exception('not today') }}{% for m in messages %}")
    with pytest.raises(BadConversation, match="template refused: not today"):
        encode({"messages": chat("Hello", "Hi")}, chatml(refusing))


CALLED = {"type": "function", "function": {"name": "get_tide", "arguments": {"at": "Oban"}}}
ONCE, TWICE = json.dumps({"at": "Oban"}), json.dumps(json.dumps({"at": "Oban"}))


@pytest.mark.parametrize(
    "messages",
    [
        [HELLO, asking({"at": "Oban"}), {"role": "tool", "content": "2.4"}],
        [HELLO, asking(ONCE), {"role": "function", "name": "get_tide", "content": "2.4"}],
        [HELLO, asking(TWICE), {"role": "ipython", "content": [{"type": "text", "text": "2.4"}]}],
        [
            HELLO,
            {"role": "assistant", "tool_calls": [{"name": "get_tide", "arguments": ONCE}]},
            {"role": "tool", "content": 2.4},
        ],
        [
            HELLO,
            {"role": "assistant", "content": None, "function_call": CALLED["function"]},
            {"role": "tool", "content": "2.4"},
        ],
        [
            {"from": "human", "value": "Hello"},
            {"from": "function_call", "value": json.dumps(CALLED["function"])},
            {"from": "observation", "value": "2.4"},
        ],
    ],
)
def test_every_way_to_write_a_call_gives_one_form(messages):
    rows = [
        {key: messages, "tools": tools}
        for key in ("messages", "conversations")
        for tools in ([TOOL], json.dumps([TOOL]))
    ]
    for row in rows:
        read, tools = read_conversation(row)
        assert tools == [TOOL] and [message["role"] for message in read] == ["user", "assistant", "tool"]
        assert read[1]["tool_calls"] == [CALLED] and read[1]["content"] == "" and read[2]["content"] == "2.4"


def test_other_ways_to_write_a_message():
    call = {"name": "get_tide", "arguments": ONCE}
    answer = {"from": "gpt", "value": "ok", "tool_calls": [call], "reasoning_content": "hm"}
    read, _ = read_conversation({"conversations": [{"from": "human", "value": "Hello"}, answer]})
    told = {"role": "assistant", "content": "ok", "tool_calls": [CALLED], "reasoning_content": "hm"}
    assert read == [HELLO, told]
    both = [{**HELLO, "from": "human"}, {"role": "assistant", "content": "Hi", "from": "gpt"}]
    assert [m["content"] for m in read_conversation({"messages": both})[0]] == ["Hello", "Hi"]
    mixed = [{"role": "user", "value": "Hello"}, {"from": "gpt", "content": "Hi"}]
    assert read_conversation({"messages": mixed})[0] == chat("Hello", "Hi")


def test_every_way_to_give_tools_gives_one_form():
    nulls = {"x": None, "enum": ["a", None]}
    function = {"name": "get_tide", "parameters": {"type": "object", "properties": {"at": nulls}}}
    expected = {"name": "get_tide", "parameters": {"type": "object", "properties": {"at": {"enum": ["a", None]}}}}
    for name in ("tools", "functions"):
        for tool in (function, {"type": "function", "function": function, "strict": None}):
            for given in ([tool], json.dumps([tool])):
                row = {"messages": chat("Hello", "Hi"), name: given}
                assert read_conversation(row)[1] == [{"type": "function", "function": expected}]
    assert read_conversation({"messages": chat("Hello", "Hi"), "tools": "[]"})[1] is None
    odd = [{"type": "web_search"}, {"type": "function", "function": 7}]
    samples, changes = encode_conversation({"messages": chat("Hello", "Hi", system="<tools>"), "tools": odd}, chatml())
    assert changes == ["tools written as text"] and '{"type": "web_search"}' in samples[0].chat.text
    samples, _ = encode_conversation({"messages": [HELLO, asking(ONCE)], "functions": [function]}, chatml(TOOLS))
    assert '"enum": ["a", null]' in samples[0].chat.text and '"x"' not in samples[0].chat.text


def test_reasons_are_short():
    with pytest.raises(BadConversation) as caught:
        read_conversation({"messages": [HELLO, asking(["x" * 3_000_000])]})
    assert len(str(caught.value)) < 200 and str(caught.value).endswith("xxx...")


def test_results_that_are_objects_become_json():
    messages = [HELLO, asking(ONCE), {"role": "tool", "content": {"height": [1, None], "sea": "å"}}]
    assert read_conversation({"messages": messages})[0][2]["content"] == '{"height": [1, null], "sea": "å"}'


def test_other_names_of_roles():
    roles = ("developer", "human", "gpt", "user", "model", "user", "bot")
    read, _ = read_conversation({"messages": [{"role": role, "content": "x"} for role in roles]})
    assert [m["role"] for m in read] == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]


def test_an_answer_the_template_drops_is_no_supervision():
    silent = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'assistant' %}")
    silent = silent.replace("{{ '<|im_start|>assistant\n' }}", "")
    assert reason_of({"messages": chat("Hello", "Hi")}, chatml(silent)) == "template drops the assistant's text"


def test_text_parts_are_joined_and_the_row_is_left_alone():
    parts = [{"type": "text", "text": "Good "}, "day"]
    row = {"messages": [{"role": "user", "content": parts, "name": None}, {"role": "assistant", "content": parts}]}
    before = json.dumps(row)
    tokenizer = chatml()
    assert encode(row, tokenizer) == encode({"messages": chat("Good day", "Good day")}, tokenizer)
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
    encoded = encode({"messages": messages, "tools": [TOOL]}, tokenizer)
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
    assert "None" not in tokenizer.decode(encode(row, tokenizer)["input_ids"])


def test_tool_text_is_never_silently_lost():
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    done = [{"role": "tool", "content": "2.4"}, {"role": "assistant", "content": "2.4 m"}]
    for extra in ({}, {"resp_ids": [5]}):
        for row in ({"messages": [HELLO, call, *done]}, {"messages": chat("Hello", "Hi"), "tools": [TOOL]}):
            samples, changes = encode_conversation({**row, **extra}, chatml())
            assert changes == ["tools written as text"]
            assert "get_tide" in chatml().decode(samples[0].input_ids)
            assert encode_conversation({**row, "tools": [TOOL], **extra}, chatml(TOOLS))[1] == []
    # A template that refuses an assistant turn without calls or content reads the calls.
    picky = TOOLS.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'assistant' and not (m.content or m.tool_calls) %}"
        "{{ raise_exception('empty') }}{% endif %}",
    )
    assert encode_conversation({"messages": [HELLO, call, *done]}, chatml(picky))[1] == []


def test_an_unfit_tokenizer_is_not_the_rows_fault(tmp_path):
    class Slow(PreTrainedTokenizerFast):
        is_fast = False

    slow = Slow(tokenizer_object=chatml().backend_tokenizer, eos_token="<|im_end|>")
    for tokenizer, message in ((slow, "offsets"), (chatml(None), "chat_template|chat template")):
        with pytest.raises(ValueError, match=message) as caught:
            encode({"messages": chat("Hello", "Hi")}, tokenizer)
        assert not isinstance(caught.value, BadConversation)
        with pytest.raises(ValueError, match=message):  # not skipped row by row
            load(write(tmp_path, [{"messages": chat("Hello", "Hi")}]), tokenizer)


# ---- real rows ------------------------------------------------------------------------------------------------------


def test_real_rows(smollm2):
    path, rows = shared("smollm2_chats.jsonl"), []
    answers = Counter()
    for _, row in read_jsonl(path):
        from_ids = encode(row, smollm2)
        from_text = encode({"messages": row["messages"]}, smollm2)
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
    train, evaluation, counts = load(shared("smollm2_chats.jsonl"), smollm2, max_seq_len=4096, eval_fraction=0.05)
    assert counts["read"] == 1549 == len(train) + len(evaluation) and 50 < len(evaluation) < 110


@pytest.mark.parametrize("template", [None, TOOLS, "gemma"])
def test_real_agent_rows_lose_nothing(template, smollm2):
    tokenizer = {None: smollm2, TOOLS: chatml(TOOLS), "gemma": gemma()}[template]
    end, outcomes = ("<end_of_turn>" if template == "gemma" else "<|im_end|>"), Counter()
    for _, row in read_jsonl(shared("formats/airline_tool_calls.jsonl")):
        samples, changes = encode_conversation(row, tokenizer, [tokenizer.convert_tokens_to_ids(end)])
        outcomes.update(changes or ["as it is"])
        (encoded,) = ({"input_ids": sample.input_ids, "loss_mask": sample.loss_mask} for sample in samples)
        runs = supervised_runs(encoded, tokenizer)
        spoken = [m for m in row["messages"] if m["role"] == "assistant"]
        assert len(runs) == len(spoken)
        for message, run in zip(spoken, runs, strict=True):
            assert run.startswith((message.get("content") or "").strip()) and run.endswith(end)
            assert all(call["function"]["name"] in run for call in message.get("tool_calls") or [])
        text = tokenizer.decode(encoded["input_ids"])
        assert all(m["content"].strip() in text for m in row["messages"] if m["role"] == "tool")
    assert (
        outcomes
        == {
            None: {"tools written as text": 16, "as it is": 4},
            TOOLS: {"as it is": 20},
            "gemma": {"tools written as text": 16, "as it is": 4},
        }[template]
    )


def test_mixed_shapes_are_kept_or_named(smollm2, tmp_path):
    _, _, counts = load(shared("formats/mixed_shapes.jsonl"), smollm2, eval_fraction=0)
    assert counts["read"] == 9 and counts["train"] == 5 and counts["tools written as text"] == 3
    assert {name: count for name, count in counts.items() if name.startswith("skipped")} == {
        "skipped: tool call arguments are not JSON": 1,
        "skipped: no messages": 2,
        "skipped: no assistant turn": 1,
    }
