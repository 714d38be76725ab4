"""Conversation files and folders: broken lines, counts that add up, the split into train and eval."""

import datetime
import decimal
import json
import random
from collections import Counter

import pytest
from chats import (
    CHATML,
    HELLO,
    TOOL,
    TOOLS,
    chat,
    chatml,
    encode,
    reason_of,
    write,
)
from conftest import ROOT
from datasets import Dataset
from test_conversations import ONCE, asking, load

from data.conversations import is_eval, read_conversation, read_jsonl, read_rows


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
