"""Conversations written by the target: planning, self-prompting, counts, kills and refusals, with a tiny random target."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
from chats import CHATML, make_tokenizer
from conftest import ROOT, SIZES, plain
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from data.backends import InProcess, Reply, Server
from data.chat_template import encode_conversation
from data.conversations import BadConversation, read_jsonl
from data.converse import converse, fault_of_words
from data.generate_data import _Report, generate_data, main
from data.plans import TOPICS, plan_row, plan_self_prompted, user_ends


ENDS = ["<|im_end|>", "<e1>", "<e2>", "<e3>"]  # several, so that a random target ends its turns now and then
USER, ASSISTANT = {"role": "user", "content": "Say it."}, {"role": "assistant", "content": "No."}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(CHATML, ["<|im_start|>", *ENDS], eos="<|im_end|>")


def make_target(tokenizer, model=LlamaForCausalLM, config=LlamaConfig, **sizes):
    """A random target with clear preferences, which says lower-case letters, spaces and ends only."""
    torch.manual_seed(1)
    sizes = SIZES | {"num_hidden_layers": 2, "max_position_embeddings": 512} | sizes
    target = model(config(**sizes | {"vocab_size": len(tokenizer)})).eval().requires_grad_(False)
    for parameter in target.parameters():
        if parameter.dim() == 2:
            parameter.mul_(6)  # otherwise the layers hardly change what the next token is
    ends = tokenizer.convert_tokens_to_ids(ENDS if "<e1>" in tokenizer.get_vocab() else ["<end_of_turn>"])
    said = tokenizer.convert_tokens_to_ids([*"abcdefghijklmnopqrstuvwxyz", "Ġ"]) + ends
    rows = torch.randn(len(said), target.config.hidden_size)
    target.lm_head.weight = torch.nn.Parameter(torch.zeros_like(target.lm_head.weight), requires_grad=False)
    rows[-len(ends) :] *= 0.7
    target.lm_head.weight[said] = rows
    target.generation_config.eos_token_id = ends
    target.generation_config.do_sample = True  # a server's default; it asks for temperature 0 not to
    return target


@pytest.fixture(scope="module")
def target(tokenizer):
    return make_target(tokenizer)


@pytest.fixture(scope="module")
def folder(target, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_prompts(path, count=12):
    return write_rows(path, [{"id": f"q{i}", "prompt": f"Question {i}" + "?" * (5 * i)} for i in range(count)])


def run(output, target, tokenizer, batch_size=3, **options):
    backend = InProcess(target, tokenizer, batch_size=batch_size, max_length=448)
    options = {"max_new_tokens": 24, "progress": False} | options
    manifest = generate_data(output, backend, tokenizer, **options)
    return [row for _, row in read_jsonl(output)], manifest["counts"]


def test_single_answers_carry_the_exact_tokens(target, tokenizer, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    rows, counts = run(tmp_path / "out.jsonl", target, tokenizer, prompts=prompts)
    assert counts["in"] == counts["done"] == 12 and [row["id"] for row in rows] == [f"q{i}" for i in range(12)]
    assert [row["temperature"] for row in rows] == [0.0, 0.7, 1.0] * 4
    ends = set(target.generation_config.eos_token_id)
    for row in rows:
        encoded = encode_conversation(row, tokenizer)[0][0]
        supervised = [i for i, mask in zip(encoded.input_ids, encoded.loss_mask) if mask]
        assert supervised == row["resp_ids"] and (row["resp_ids"][-1] in ends) == (row["finish"] == "stop")
        assert row["messages"][-1]["content"] == tokenizer.decode(row["resp_ids"], skip_special_tokens=True)
        if row["temperature"] == 0:
            prompt = torch.tensor([encoded.input_ids[: -len(supervised)]])
            assert supervised == plain(target, prompt)[0, prompt.shape[1] :].tolist()
    assert {row["finish"] for row in rows} == {"stop", "length"}


def test_every_answer_of_a_conversation_is_written_anew(target, tokenizer, tmp_path):
    system = {"role": "system", "content": "Be brief."}
    chats = [[system, USER | {"content": f"{i}!"}, ASSISTANT, USER, ASSISTANT, USER] for i in range(12)]
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"messages": chat} for chat in chats])
    rows, counts = run(tmp_path / "out.jsonl", target, tokenizer, prompts=prompts, max_new_tokens=60)
    assert counts["done"] == 12 and any(name.startswith("of the done cut") for name in counts)
    answers = Counter()
    for row, chat in zip(rows, chats):
        kept = [message for message in row["messages"] if message["role"] != "assistant"]
        assert kept == [m for m in chat if m["role"] != "assistant"][: len(kept)]
        assert row["messages"][-1]["role"] == "assistant" and ASSISTANT not in row["messages"]
        count = sum(message["role"] == "assistant" for message in row["messages"])
        answers[count] += 1
        assert ("resp_ids" in row) == (count == 1)
        if count > 1 and row["temperature"] == 0:  # the second answer follows the new first one, not the old one
            first = next(i for i, m in enumerate(row["messages"]) if m["role"] == "assistant")
            for messages, same in ((row["messages"], True), (chat, False)):
                ids = tokenizer.apply_chat_template(messages[: first + 2], add_generation_prompt=True)["input_ids"]
                new = plain(target, torch.tensor([ids]), max_new_tokens=60)[0, len(ids) :]
                text = tokenizer.decode(new, skip_special_tokens=True)
                assert (text == row["messages"][first + 2]["content"]) == same
    assert answers[1] and answers[3]


def test_self_prompting_covers_the_topics_and_rejects_bad_turns(target, tokenizer, tmp_path):
    rows, counts = run(tmp_path / "out.jsonl", target, tokenizer, num_conversations=7, max_turns=2)
    assert counts["in"] == 7 == counts["done"] + sum(n for key, n in counts.items() if "skipped" in key)
    assert counts["done"] > 4 and any(key.startswith("user turn drawn again") for key in counts)
    assert {row["source"] for row in rows} >= {"self: code", "self: chat"}
    system, user, *_ = rows[1]["messages"]
    assert system == {"role": "system", "content": TOPICS[1][1]} and user["role"] == "user" and user["content"]
    assert len({row["messages"][1]["content"] for row in rows}) == len(rows)
    # The user's words are what the target makes of its own template.
    plan = next(plan_self_prompted(tokenizer, 1, 1))[1] | {"id": "0", "seed": 5, "temperature": 0.0}
    assert (
        converse(plan, tokenizer, (), 9, Counter()).send(None).text
        == f"<|im_start|>system\n{TOPICS[0][1]}<|im_end|>\n<|im_start|>user\n"
    )


def test_user_turns_are_judged():
    good = "How do I sort a list of words by length in Python?"

    def fault(words, finish="stop", ids=None):
        return fault_of_words("How " + words, Reply({"content": words}, finish, ids), {3, 9})

    assert fault(good) is None and fault(good, ids=[7, 8, 9]) is None
    faults = {
        " ": "empty",
        "m?!": "too short",
        good + "\ufffd": "special or broken tokens",
        "ab " * 60: "repeats itself",
    }
    assert {words: fault(words) for words in faults} == faults
    assert fault(good, "length") == "no end" and fault(good, ids=[7, 3, 9]) == "special or broken tokens"


def test_the_end_of_a_user_turn_is_found_where_it_is_no_eos():
    template = "{% for m in messages %}{{ '[A]' + m.content + '[B]' if m.role == 'user' else m.content + '</s>' }}{% endfor %}"
    tokenizer = make_tokenizer(template, ["[A]", "[B]", "</s>"], eos="</s>")
    assert user_ends(tokenizer) == (tokenizer.convert_tokens_to_ids("[B]"),)


def test_prompt_rows_become_plans():
    answer = {"role": "assistant"}
    assert plan_row({"prompt": "Hi"}, None)["messages"] == [{"role": "user", "content": "Hi"}, answer]
    assert len(plan_row({"turns": ["1", "2", "3"]}, None)["messages"]) == 6
    assert len(plan_row({"turns": ["1", "2", "3"]}, 2)["messages"]) == 4
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    chat = plan_row({"messages": [USER, called, ASSISTANT, USER | {"name": None}], "tools": '[{"a": 1}]'}, None)
    assert chat == {"messages": [USER, answer, USER, answer], "tools": [{"a": 1}]}
    bad = [{}, {"messages": []}, {"prompt": ""}, {"messages": [ASSISTANT]}, {"turns": [3]}, {"prompt": "\ud800"}]
    for row in bad + [{"prompt": "Hi", "tools": "{"}, {"messages": ["Hi"]}]:
        with pytest.raises(BadConversation):
            plan_row(row, None)


def call(name):
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def result(name, content):
    return {"role": "tool", "content": content} | ({"tool_call_id": name} if name else {})


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ({"content": "", "tool_calls": [call("new1"), call("new2")]}, ["new1", "new2"]),
        ({"content": "<tool_call>f</tool_call>\n<tool_call>f</tool_call>"}, [None, None]),
        ({"content": "I call nothing."}, None),
        ({"content": "", "tool_calls": [call("new1")]}, None),
        ({"content": "<tool_call>f</tool_call>" * 3}, None),
    ],
)
def test_tool_results_follow_as_many_new_calls_only(answer, names):
    open_ = {"role": "assistant"}
    messages = [USER, open_, result("old1", "5"), result("old2", "6"), open_]
    plan = {"messages": messages, "tools": [{}], "id": "0", "source": "", "temperature": 1.0, "seed": 1}
    talk, answer = converse(plan, None, (), 9, Counter()), {"role": "assistant"} | answer
    assert talk.send(None).messages == [USER]
    if names is None:
        with pytest.raises(StopIteration) as stop:
            talk.send(Reply(answer, "stop"))
        row = stop.value.value
        assert row["messages"] == [USER, answer] and row["turns_left_out"] == 1
        assert row["cut"] == "tool calls and results do not match"
        return
    asked = talk.send(Reply(answer, "stop")).messages
    assert asked == [USER, answer, result(names[0], "5"), result(names[1], "6")]
    with pytest.raises(StopIteration) as stop:  # calls of the last answer need no results
        talk.send(Reply(ASSISTANT | {"tool_calls": [call("last")]}, "stop"))
    assert stop.value.value["messages"][:-1] == asked and not {"resp_ids", "cut"} & stop.value.value.keys()


def test_every_row_is_counted(target, tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = ['\ufeff{"prompt": "One?"}\r', '{"prompt": "One?"}', "{", "", '{"prompt": "Two?", "tools": 3}', "[]"]
    lines += [
        '{"id": "x", "prompt": "Three?"}',
        '{"id": "x", "prompt": "Four?"}',
        json.dumps({"prompt": "long " * 99}),
    ]
    path.write_text("\n".join(lines + ["[]"] * 40 + ['{"prompt": "Last?"}']))  # more bad ones than may wait in turn
    rows, counts = run(tmp_path / "out.jsonl", target, tokenizer, batch_size=1, prompts=str(path))
    assert [row["id"] for row in rows] == ["line-1", "x", "x-line-8", "line-50"]
    reasons = {
        "duplicate prompt": 1,
        "invalid JSON": 1,
        "tools are not a list of schemas": 1,
        "row is not an object": 41,
    }
    reasons["no room for an answer"] = 1
    told = {name: count for name, count in counts.items() if not name.startswith("of the done")}
    assert told == {"in": 49, "done": 4} | {f"skipped: {reason}": count for reason, count in reasons.items()}
    path.write_text("{\n")
    with pytest.raises(ValueError, match="no conversation: 1 in; 0 done; 1 skipped: invalid JSON"):
        run(tmp_path / "none.jsonl", target, tokenizer, prompts=str(path))


def test_only_whole_duplicates_of_the_prompts_are_left_out(target, tokenizer, tmp_path):
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    chats = [{"turns": ["One?", "Two?"]}, {"turns": ["One?", "Three?"]}, {"turns": ["One?"]}]
    chats += [{"turns": ["One?"], "tools": tools}, {"turns": ["One?", "Two?"]}, {"prompt": "One?"}]
    prompts = write_rows(tmp_path / "prompts.jsonl", [*chats, {"messages": [USER, ASSISTANT]}])
    options = {"prompts": prompts, "max_new_tokens": 2, "temperatures": (0.0,)}
    rows, counts = run(tmp_path / "out.jsonl", target, tokenizer, **options)
    assert [row["id"] for row in rows] == ["line-1", "line-2", "line-3", "line-4", "line-7"]
    assert counts["in"] == 7 and counts["skipped: duplicate prompt"] == 2
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines[:2]))  # a resumed run knows the prompts that are done
    again, more = run(tmp_path / "out.jsonl", target, tokenizer, **options)
    assert again == rows and [more[key] for key in ("in", "done", "skipped: duplicate prompt")] == [7, 5, 2]


def test_conversations_cut_at_the_limit_are_counted(target, tokenizer, tmp_path):
    prompts = write_rows(tmp_path / "p.jsonl", [{"turns": [f"{i}?"] * (1 + i % 3)} for i in range(6)])
    options = {"prompts": prompts, "temperatures": (0.0,), "max_new_tokens": 2}
    rows, counts = run(tmp_path / "out.jsonl", target, tokenizer, **options)
    cut = [(row["turns_left_out"], row["cut"]) for row in rows if "cut" in row]
    assert len(cut) > 3 and {reason for _, reason in cut} == {"answer hit the length limit (--max_new_tokens)"}
    assert counts["of the done cut: answer hit the length limit (--max_new_tokens)"] == len(cut)
    assert counts["turns left out by cuts"] == sum(left for left, _ in cut) > 0
    assert sum(row["messages"][-1]["role"] == "assistant" for row in rows) == 6
    answers = sum(message["role"] == "assistant" for row in rows for message in row["messages"])
    assert answers + counts["turns left out by cuts"] == 2 * (1 + 2 + 3)
    assert run(tmp_path / "out.jsonl", target, tokenizer, **options)[1] == counts  # a resumed run, too


def test_settings_bind_an_output_that_has_rows_only(target, tokenizer, tmp_path):
    output = tmp_path / "new" / "out.jsonl"
    with pytest.raises(FileNotFoundError, match="mistyped"):
        run(output, target, tokenizer, prompts=str(tmp_path / "mistyped.jsonl"))
    assert not output.parent.exists()
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match="no conversation"):
        run(output, target, tokenizer, prompts=str(tmp_path / "bad.jsonl"))
    options = {"prompts": write_prompts(tmp_path / "prompts.jsonl", 2), "max_new_tokens": 2}
    assert run(output, target, tokenizer, **options)[1]["done"] == 2
    with pytest.raises(ValueError, match="was made with seed 0, not 1"):
        run(output, target, tokenizer, **options, seed=1)
    output.write_bytes(output.read_bytes()[:9])  # killed in its first row
    assert run(output, target, tokenizer, **options, seed=1)[1]["done"] == 2


@pytest.mark.parametrize("name", ["batch_size", "max_length", "concurrency", "max_turns", "max_new_tokens"])
def test_counts_below_one_are_refused_before_anything_is_loaded(name, tmp_path):
    with pytest.raises(SystemExit, match=f"error: {name} is 0: it has to be at least 1"):
        main(["--output", str(tmp_path / "out.jsonl"), "--target_model", str(tmp_path / "none"), f"--{name}", "0"])
    assert not any(tmp_path.iterdir())


def test_arguments_out_of_range_are_refused(target, tokenizer, tmp_path):
    faults = [{"max_turns": 0}, {"max_new_tokens": 0}, {"num_conversations": 0}, {"batch_size": 0}]
    for options in [*faults, {"temperatures": ()}, {"temperatures": (-1.0,)}, {"temperatures": (float("nan"),)}]:
        with pytest.raises(ValueError, match="at least"):
            run(tmp_path / "out.jsonl", target, tokenizer, **options)
    with pytest.raises(ValueError, match="concurrency is 0"):
        Server("http://127.0.0.1:9/v1", "some", concurrency=0)
    assert not any(tmp_path.iterdir())


def test_no_local_path_is_told_and_any_spelling_of_one_is_the_same_input(target, tokenizer, tmp_path, monkeypatch):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    options = {"prompts": prompts, "max_new_tokens": 2}
    monkeypatch.setattr(target, "name_or_path", str(tmp_path / "own_target"))
    rows, _ = run(tmp_path / "out.jsonl", target, tokenizer, **options)
    assert {row["source"] for row in rows} == {"prompts.jsonl"}
    for path in (tmp_path / "out.jsonl", tmp_path / "out.jsonl.manifest.json"):
        assert str(tmp_path) not in path.read_text()
    monkeypatch.chdir(tmp_path)
    for spelling in ("prompts.jsonl", f"../{tmp_path.name}/./prompts.jsonl"):
        assert run(tmp_path / "out.jsonl", target, tokenizer, **options | {"prompts": spelling})[0] == rows
    write_prompts(tmp_path / "prompts.jsonl", 3)
    with pytest.raises(ValueError, match="was made with prompts_sha256"):
        run(tmp_path / "out.jsonl", target, tokenizer, **options)


def test_the_time_is_estimated_from_what_this_run_has_answered(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("data.generate_data.time.monotonic", lambda: now[0])
    report = _Report(rows=100, there=40, cost="", slots=2, progress=True)
    for outcome in ["skipped: invalid JSON"] * 5 + ["done"] * 3:
        now[0] += 30.0 * (outcome == "done")
        report.add("some", outcome)
    report.bar.close()
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("about")]
    assert told == ["about 26 minutes for the other 53, 30.0 s each"]  # 100 - 40 - 5 - 2


def test_names_are_unique_whatever_the_ids(target, tokenizer, tmp_path):
    ids = ["x-line-3", "x", "x", None, "\ud83d", "?", "line-8", 9, [1], "line-2"]
    rows = [{"prompt": f"Question {i}"} | ({} if own is None else {"id": own}) for i, own in enumerate(ids)]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    lines = [*(tmp_path / "prompts.jsonl").read_text().splitlines(), "{broken"]
    lines[7:7] = ["{broken"]  # line 8, whose name is taken
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    rows, counts = run(tmp_path / "out.jsonl", target, tokenizer, prompts=prompts, max_new_tokens=2)
    assert counts["in"] == 12 and counts["done"] == 10 and counts["skipped: invalid JSON"] == 2
    names = ["x-line-3", "x", "x-line-3-line-3", "line-4", "?", "?-line-6", "line-8", "9", "line-10", "line-2"]
    assert [row["id"] for row in rows] == names
    assert run(tmp_path / "out.jsonl", target, tokenizer, prompts=prompts, max_new_tokens=2) == (rows, counts)


def test_dates_of_parquet_files_are_kept_as_text(target, tokenizer, tmp_path):
    chat = [{"role": "user", "content": "When?", "sent": datetime(2024, 1, 2), "raw": b"1"}]
    Dataset.from_list([{"messages": chat}]).to_parquet(tmp_path / "chats/train.parquet")
    options = {"prompts": str(tmp_path / "chats"), "max_new_tokens": 2}
    rows, counts = run(tmp_path / "out.jsonl", target, tokenizer, **options)
    assert counts["done"] == 1
    assert rows[0]["messages"][0] == chat[0] | {"sent": "2024-01-02 00:00:00", "raw": "1"}


def test_a_row_nested_too_deeply_is_skipped(target, tokenizer, tmp_path):
    deep = ["[" * 100_000, *([json.loads('{"a":' * depth + "1" + "}" * depth)] for depth in (300, 600, 900))]
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "One?"}, *({"prompt": "Two?", "tools": t} for t in deep)])
    rows, counts = run(tmp_path / "out.jsonl", target, tokenizer, prompts=prompts, max_new_tokens=2, batch_size=1)
    assert rows[0]["id"] == "line-1" and counts["in"] == 5 == counts["done"] + sum(
        count for name, count in counts.items() if name.startswith("skipped")
    )
    assert counts["skipped: nested too deeply"] > 1


def test_a_killed_run_goes_on_and_gives_the_same_rows(folder, target, tokenizer, tmp_path):
    prompts, output = write_prompts(tmp_path / "prompts.jsonl", 16), tmp_path / "out.jsonl"
    options = {"prompts": prompts, "max_new_tokens": 40, "seed": 3}
    whole, _ = run(tmp_path / "whole.jsonl", target, tokenizer, batch_size=4, **options)
    target.name_or_path = folder
    command = f"--output {output} --target_model {folder} --prompts {prompts} --max_new_tokens 40 --seed 3"
    command += " --batch_size 2 --max_length 448"
    process = subprocess.Popen([sys.executable, "-m", "data.generate_data", *command.split()], cwd=ROOT)
    while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = output.read_bytes()
    assert 3 <= there.count(b"\n") < 16
    output.write_bytes(there + b'{"id": "q3')  # as a kill in the middle of a write leaves it
    others = write_prompts(tmp_path / "others.jsonl", 3)
    for change in ({"seed": 4}, {"temperatures": (1.0,)}, {"prompts": others}, {"max_new_tokens": 9}):
        with pytest.raises(ValueError, match="was made with"):
            run(output, target, tokenizer, **options | change)
    assert output.read_bytes().startswith(there)

    def interrupt():
        while output.read_bytes().count(b"\n") < there.count(b"\n") + 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where a shell started this in the background
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(SystemExit, match="130"):
        main(command.split())
    signal.signal(signal.SIGINT, before)
    rows, counts = run(output, target, tokenizer, **options)
    assert rows == whole and counts["done"] == 16
    before = output.read_bytes()
    assert run(output, target, tokenizer, **options)[0] == whole and output.read_bytes() == before
    (tmp_path / "out.jsonl.manifest.json").unlink()
    with pytest.raises(ValueError, match="name another output"):
        run(output, target, tokenizer, **options)


def test_what_no_time_is_left_for_is_counted_and_asked_later(target, tokenizer, tmp_path, monkeypatch):
    prompts, output = write_prompts(tmp_path / "prompts.jsonl", 16), tmp_path / "out.jsonl"
    with open(prompts, "a") as file:
        file.write("{\n")  # what takes no time is told, late as it may be
    options = {"prompts": prompts, "batch_size": 1, "max_new_tokens": 30}
    whole, all_counts = run(tmp_path / "whole.jsonl", target, tokenizer, **options)

    def minutes():  # every row takes one
        return 60.0 * output.read_bytes().count(b"\n") if output.exists() else 0.0

    monkeypatch.setattr("data.generate_data.time", SimpleNamespace(monotonic=minutes))
    rows, counts = run(output, target, tokenizer, **options, max_minutes=3)
    assert 4 <= len(rows) < 10 and rows == whole[: len(rows)]  # those under way at that moment were finished
    told = {name: count for name, count in counts.items() if not name.startswith("of the done")}
    assert told == {
        **{"in": 17, "done": len(rows), "not asked: out of time": 16 - len(rows), "skipped: invalid JSON": 1}
    }
    again, counts = run(output, target, tokenizer, **options)
    assert again == whole and counts == all_counts
    with pytest.raises(ValueError, match="max_minutes is 0: it has to be above 0"):
        run(output, target, tokenizer, **options, max_minutes=0)


def test_rows_there_behind_those_not_asked_count_as_done(target, tokenizer, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 6)
    options = {"prompts": prompts, "max_new_tokens": 2}
    run(tmp_path / "out.jsonl", target, tokenizer, **options)
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines[3:]))  # as where the first requests had failed
    rows, counts = run(tmp_path / "out.jsonl", target, tokenizer, **options, max_minutes=1e-9)
    assert [row["id"] for row in rows] == ["q3", "q4", "q5"]
    assert [counts[name] for name in ("in", "done", "not asked: out of time")] == [6, 3, 3]


def test_the_dtype_that_wrote_binds_the_output(folder, target, tokenizer, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    command = ["--output", str(tmp_path / "out.jsonl"), "--target_model", folder, "--prompts", prompts]
    command += ["--max_new_tokens", "2", "--max_length", "448"]
    main([*command, "--dtype", "bfloat16"])
    settings = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["settings"]
    assert settings["dtype"] == "bfloat16"
    with pytest.raises(SystemExit, match="was made with dtype 'bfloat16', not None"):
        main(command)
