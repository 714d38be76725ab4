"""Rows of every shape to one form, bad rows, files, and the real data."""

import datetime
import decimal
import json
import random
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
from conftest import ROOT
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from data.chat_template import encode_conversation
from data.conversations import BadConversation, is_eval, read_conversation, read_jsonl, read_rows
from data.sequence_packing import pack_file


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


# ---- files ----------------------------------------------------------------------------------------------------------


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
        (9, "nested too deeply"),
        (10, "invalid JSON"),
    ]
    with pytest.raises(FileNotFoundError):
        list(read_jsonl(tmp_path / "missing.jsonl"))


def nested(levels):
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize("levels", [101, 900, 960, 990, 100_000])
def test_deep_nesting_is_a_reason_to_skip_wherever_it_is(tmp_path, levels):
    deep, text = nested(levels), json.dumps(nested(levels))
    call = '{"messages": [%s, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": %s}]}]}'
    hello, hi = json.dumps(HELLO), '{"role": "assistant", "content": "Hi"}'
    lines = [
        *(call % (hello, arguments) for arguments in (deep, text)),
        *(f'{{"messages": [{hello}, {hi}], "tools": {tools}}}' for tools in (f"[{deep}]", text)),
        f'{{"messages": [{hello}, {hi}], "notes": {deep}}}',
        f'{{"conversations": [{{"from": "human", "value": "x"}}, {{"from": "function_call", "value": {text}}}]}}',
        call % (hello, nested(90)),
    ]
    (tmp_path / "deep.jsonl").write_text("\n".join(lines))
    for template in (CHATML, TOOLS):
        _, _, counts = load(tmp_path / "deep.jsonl", chatml(template), eval_fraction=0)
        assert counts["read"] == 7 and counts["train"] == 1 and counts["skipped: nested too deeply"] == 6


def test_load_counts_every_row(tmp_path, capsys):
    tokenizer = chatml()
    good = [{"messages": chat(f"Question {i}", f"Answer {i}")} for i in range(200)]
    bad = [{"messages": []}, {"messages": [HELLO]}, {"messages": [HELLO]}, 7]
    # The same conversation written otherwise is still a duplicate.
    again = {"messages": [{"role": "user", "content": [{"text": "Question 3"}]}, good[3]["messages"][1]], "id": "x"}
    long_answer, long_prompt = {"messages": chat("Long", "a" * 900)}, {"messages": chat("b" * 900, "Hi")}
    path = write(tmp_path, [*bad, *good, again, good[7], long_answer, long_prompt])
    train, evaluation, counts = load(path, tokenizer, progress=True)
    skipped = {
        "skipped: no messages": 1,
        "skipped: no assistant turn": 2,
        "skipped: row is not an object": 1,
        "skipped: duplicate": 2,
    }
    assert counts["read"] == 208 and counts["cut into windows"] == 2
    assert {name: count for name, count in counts.items() if name.startswith("skipped")} == skipped
    assert counts["train"] + counts["eval"] == 202
    assert "2 skipped: no assistant turn (first in line 2: no assistant turn)" in capsys.readouterr().out
    expected = {tuple(encode(row, tokenizer)["input_ids"]) for row in good}
    assert expected <= set(train + evaluation) and len(train + evaluation) > 202


def test_a_data_set_is_read_like_a_file(tmp_path):
    rows = [{"messages": chat(f"Question {i}", "Hi")} for i in range(5)]
    rows[2] = {"messages": [HELLO, asking(ONCE), {"role": "tool", "content": "2.4"}], "tools": json.dumps([TOOL])}
    rows[3]["messages"][1]["content"] = None  # a column of Arrow: every row has every key
    Dataset.from_list(rows).to_parquet(tmp_path / "parquet/train.parquet")
    read = [row for _, row in read_rows(tmp_path / "parquet")]
    assert read[0] == rows[0] and read[2]["messages"][0] == HELLO
    assert "tool_calls" not in read[0]["messages"][0] and reason_of(read[3], chatml()) == "message without content"
    for name in ("chats.json1", "missing.jsonl", "data/missing.jsonl", "data/missing.parquet", "/no/folder"):
        with pytest.raises(FileNotFoundError, match=f"there is no file or folder {name}, and the id of a data set"):
            list(read_rows(name))


def test_a_folder_is_read_whole_file_by_file(tmp_path):
    rows = [{"messages": chat(f"Question {i}", "Hi")} for i in range(9)]
    calling = {"messages": [HELLO, asking({"at": "Oban"})], "tools": [TOOL]}
    folder = tmp_path / "folder"
    (folder / "b/.cache").mkdir(parents=True)
    write(folder, rows[:2], "train.jsonl")
    write(folder, [calling, {"conversations": []}], "more.jsonl")
    (folder / "b/broken.json").write_text("{broken\n" + json.dumps(rows[2]))
    Dataset.from_list(rows[3:5]).to_parquet(folder / "b/one.parquet")
    Dataset.from_list([calling]).to_parquet(folder / "b/two.parquet")
    for name in ("b/.cache/x.jsonl", "manifest.json", "README.md"):
        (folder / name).write_text("{}")
    read = list(read_rows(folder))
    assert [number for number, _ in read] == list(range(1, 10))
    assert read[0][1].reason == "invalid JSON"
    assert [row for _, row in read[1:]] == [*rows[2:5], calling, calling, {"conversations": []}, *rows[:2]]
    assert list(read_rows(folder / "b/two.parquet")) == [(1, calling)]


def test_folders_that_cannot_be_read_say_why(tmp_path):
    Dataset.from_list([{"messages": chat("a", "b")}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved holds Arrow files.*save the data set with to_parquet or to_json"):
        list(read_rows(tmp_path / "saved"))
    (tmp_path / "bad").mkdir()
    with pytest.raises(ValueError, match="bad holds no .jsonl, .json, .parquet file"):
        list(read_rows(tmp_path / "bad"))
    (tmp_path / "bad/x.parquet").write_text("{}")
    with pytest.raises(ValueError, match="x.parquet cannot be read as Parquet"):
        list(read_rows(tmp_path / "bad"))


def test_values_that_are_no_json_become_text(tmp_path):
    day, price = datetime.date(2024, 5, 6), decimal.Decimal("1.50")
    turns = chat("Hello", "Hi")
    turns[0] |= {"timestamp": datetime.datetime(2024, 5, 6, 7), "raw": b"x", "price": price}
    calling = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"day": day, "price": price}}]}
    for number, messages in enumerate((turns, [HELLO, calling])):
        Dataset.from_list([{"messages": messages}]).to_parquet(tmp_path / f"{number}/train.parquet")
    (_, first), (_, second) = (next(read_rows(tmp_path / name)) for name in "01")
    assert first["messages"][0] == HELLO | {"timestamp": "2024-05-06 07:00:00", "raw": "x", "price": "1.50"}
    assert second["messages"][1]["tool_calls"][0]["arguments"] == {"day": "2024-05-06", "price": "1.50"}
    assert "2024-05-06" in chatml(TOOLS).decode(encode(second, chatml(TOOLS))["input_ids"])
    assert load(tmp_path / "0", chatml(), eval_fraction=0)[2]["train"] == 1


def test_no_progress_prints_nothing(tmp_path, capsys):
    load(write(tmp_path, [{"messages": chat(f"{i}", "Hi")} for i in range(9)]), chatml())
    assert capsys.readouterr() == ("", "")


def test_split_is_by_content(tmp_path):
    tokenizer = chatml()
    rows = [{"messages": chat(f"Question {i}", f"Answer {i}", "And?", "Yes")} for i in range(300)]
    others = [{"messages": chat(f"Other {i}", "Hi")} for i in range(60)]

    def sides(rows, name):
        train, evaluation, _ = load(write(tmp_path, rows, name), tokenizer)
        return set(train), set(evaluation)

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


def test_the_side_depends_on_what_is_said_alone():
    def sides(*rows):
        return [[is_eval(read_conversation({"messages": row(i)})[0], 0.3) for i in range(300)] for row in rows]

    def asked(i, **extra):
        return [{"role": "user", "content": f"Question {i}", **extra}, {"role": "assistant", "content": "Hi"}]

    def greeted(i):
        return [{"role": "assistant", "content": "Welcome"}, *asked(i)]

    plain, named, spaced, again, greeting, system = sides(
        asked,
        lambda i: asked(i, id=f"{i}-b"),
        lambda i: asked(i, content=f"  Question {i}\n"),
        lambda i: asked(i) + asked(i + 1),
        greeted,
        lambda i: [{"role": "system", "content": "Be brief."}, *greeted(i)],
    )
    assert plain == named == spaced == again
    assert all(60 < sum(side) < 120 for side in (plain, greeting, system))  # 90 expected, sd 8


def test_eval_fraction_at_its_ends(tmp_path):
    path = write(tmp_path, [{"messages": chat(f"{i}", "Hi")} for i in range(20)])
    train, evaluation, _ = load(path, chatml(), eval_fraction=0)
    assert (len(train), len(evaluation)) == (20, 0)
    train, evaluation, _ = load(path, chatml(), eval_fraction=1)
    assert (len(train), len(evaluation)) == (0, 20)
    for options in ({"eval_fraction": 1.5}, {"eval_fraction": -0.1}, {"max_seq_len": 1}):
        with pytest.raises(ValueError, match="max_seq_len >= 8 and 0 <= eval_fraction <= 1"):
            load(path, chatml(), **options)


def test_nothing_left_is_an_error_in_plain_words(tmp_path):
    with pytest.raises(ValueError, match="no conversation left to train on: 2 read; 2 skipped: no assistant turn"):
        load(write(tmp_path, [{"messages": [HELLO]}] * 2), chatml())
    with pytest.raises(ValueError, match="the file is empty"):
        load(write(tmp_path, []), chatml())
    rows = [{"messages": chat(f"Question {i}", "Hi")} for i in range(20)]
    in_eval = set(load(write(tmp_path, rows), chatml())[1])
    lone = next(row for row in rows if tuple(encode(row, chatml())["input_ids"]) in in_eval)
    with pytest.raises(ValueError, match="no conversation left to train on: 1 read; 1 eval"):
        load(write(tmp_path, [lone]), chatml())


def test_prompts():
    rows = [row for _, row in read_jsonl(ROOT / "data" / "prompts.jsonl")]
    assert Counter(row["category"] for row in rows) == dict.fromkeys(
        ("chat", "code", "math", "translation", "summary", "tool"), 2
    )
    assert len({row["id"] for row in rows}) == 12
    for row in rows:
        assert set(row) == {"id", "category", "messages"} and row["messages"][-1]["role"] == "user"
        encode({"messages": [*row["messages"], {"role": "assistant", "content": "ok"}]}, chatml())


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
