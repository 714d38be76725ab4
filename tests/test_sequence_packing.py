"""Packed blocks: what they hold, files, killed runs, the command."""

import json
import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from chats import TOOLS, chat, chatml, samples_of, write
from conftest import ROOT
from filelock import FileLock

from data import sequence_packing, windows
from data.chat_template import encode_conversation
from data.collator import PackingCollator
from data.sequence_packing import load_blocks, pack_conversations, pack_windows
from data.windows import split_sample


# ---- blocks ---------------------------------------------------------------------------------------------------------


def random_windows(count, longest, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [
        {"input_ids": rng.integers(0, 999, n).astype(np.int32), "loss_mask": rng.integers(0, 2, n).astype(np.int8)}
        for n in lengths
    ]


def documents(blocks):
    """The windows in packed blocks, as a multiset."""
    found = Counter()
    for block in blocks:
        ends = np.cumsum(block["seq_lengths"])
        assert ends[-1] == len(block["input_ids"]) == len(block["loss_mask"])
        for length, end in zip(block["seq_lengths"], ends):
            part = slice(end - length, end)
            found[tuple(block["input_ids"][part]), tuple(block["loss_mask"][part])] += 1
    return found


def as_documents(windows):
    return Counter((tuple(w["input_ids"].tolist()), tuple(w["loss_mask"].tolist())) for w in windows)


def test_packing_keeps_every_window_whole():
    windows = random_windows(500, 128)
    blocks = pack_windows(windows, 128)
    assert blocks.features == sequence_packing.BLOCKS
    assert documents(blocks) == as_documents(windows)
    assert max(map(len, blocks["input_ids"])) <= 128
    damaged = [dict(block) for block in blocks]
    damaged[0]["seq_lengths"] = [sum(damaged[0]["seq_lengths"])]
    assert documents(damaged) != documents(blocks) or len(blocks[0]["seq_lengths"]) == 1
    with pytest.raises(ValueError, match="a window of 128 tokens does not fit into blocks of 127"):
        pack_windows(windows, 127)


def test_packing_fills_blocks_on_realistic_lengths():
    """Chats of log-normal length (median 250, one in a hundred beyond 2000) in blocks of 4096."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(5.5, 0.9, 8000)), 20, 4096).astype(int)
    windows = [{"input_ids": np.zeros(n, np.int32), "loss_mask": np.zeros(n, np.int8)} for n in lengths]
    blocks = pack_windows(windows, 4096)
    assert lengths.sum() / (len(blocks) * 4096) > 0.995


# ---- files ----------------------------------------------------------------------------------------------------------


def many_rows(count):
    """Chats of two to five turns, every fifth one long."""
    rows = []
    for i in range(count):
        turns = [
            f"Question {i}.{k}" if k % 2 == 0 else f"Answer {i}.{k} " + "word " * (i % 7) for k in range(2 + i % 4)
        ]
        turns[1] += " and more" * (40 if i % 5 == 0 else 0)
        rows.append({"messages": chat(*turns, system="Be brief." if i % 3 else None)})
    return rows


def run(folder, rows, tokenizer=None, name="blocks", **options):
    options = {"max_seq_len": 160, "eval_fraction": 0.2, "progress": False, **options}
    return pack_conversations(write(folder, rows), folder / name, tokenizer or chatml(), **options)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(sequence_packing, "CHUNK_TOKENS", 0)
    monkeypatch.setattr(sequence_packing, "CHUNK_BLOCKS", 4)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_file_to_blocks_and_back(tmp_path, request, chunked):
    if chunked:
        request.getfixturevalue("small_chunks")
    tokenizer, rows = chatml(), many_rows(200)
    bad = [{"messages": []}, rows[3], {"messages": chat("Hello", "x" * 500, system="s" * 150)}]
    manifest = run(tmp_path, rows + bad, tokenizer)
    counts = manifest["conversations"]
    assert counts["read"] == 203 == counts["train"] + counts["eval"] + 3
    assert counts["cut into windows"] == sum(len(samples_of(row, tokenizer)[0].input_ids) > 160 for row in rows) > 40
    assert {reason: n for reason, n in counts.items() if reason.startswith("skipped")} == {
        "skipped: no messages": 1,
        "skipped: duplicate": 1,
        "skipped: system prompt too long": 1,
    }
    assert json.loads((tmp_path / "blocks" / "manifest.json").read_text()) == manifest
    assert set(os.listdir(tmp_path)) == {"chats.jsonl", "blocks"}
    splits = load_blocks(tmp_path / "blocks", tokenizer, cache_dir=tmp_path / "cache")
    assert (manifest["train"]["shards"] > 5) == chunked
    expected = Counter()
    for row in rows:
        expected += as_documents(split_sample(samples_of(row, tokenizer)[0], 160))
    assert documents(splits["train"]) + documents(splits["eval"]) == expected
    for side, blocks in splits.items():
        assert blocks.features == sequence_packing.BLOCKS
        assert manifest[side]["windows"] == sum(documents(blocks).values())
        assert manifest[side]["tokens"] == sum(map(len, blocks["input_ids"]))
        assert manifest[side]["supervised"] == sum(map(sum, blocks["loss_mask"]))
        assert manifest[side]["fill"] == manifest[side]["tokens"] / (160 * len(blocks))
    # No conversation is on both sides: their numbers are in their questions.
    numbers = [
        set(re.findall(r"Question (\d+)\.", tokenizer.decode(sum(b["input_ids"], [])))) for b in splits.values()
    ]
    assert not numbers[0] & numbers[1] and len(numbers[0] | numbers[1]) == 200 and 20 < len(numbers[1]) < 60


def test_the_collator_reads_the_blocks(tmp_path):
    run(tmp_path, many_rows(60))
    blocks = load_blocks(tmp_path / "blocks", cache_dir=tmp_path / "cache")["train"]
    batch = PackingCollator(4, 0.7, 0.2)([blocks[0], blocks[1]])
    lengths = blocks[0]["seq_lengths"] + blocks[1]["seq_lengths"]
    assert batch["position_ids"][0].tolist() == [i for length in lengths for i in range(length)]
    assert batch["cu_seq_lens_q"].diff().tolist() == lengths and (batch["labels"] != -100).any()
    assert batch["input_ids"].dtype == torch.long


def test_blocks_are_refused_where_they_do_not_fit(tmp_path):
    tokenizer = chatml()
    run(tmp_path, many_rows(60), tokenizer)
    folder, cache = tmp_path / "blocks", tmp_path / "cache"
    with pytest.raises(
        ValueError, match="made with another chat_template .that of 'tiny'.: pack the conversations again"
    ):
        load_blocks(folder, chatml(TOOLS), cache_dir=cache)
    with pytest.raises(ValueError, match="made with another tokenizer"):
        load_blocks(folder, chatml(merges=[("a", "b")]), cache_dir=cache)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["train"]["blocks"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"holds \d+ train blocks, but its manifest says \d+"):
        load_blocks(folder, tokenizer, cache_dir=cache)
    (folder / "data" / "train-00000-of-00001.parquet").unlink()
    with pytest.raises(FileNotFoundError):
        load_blocks(folder, tokenizer, cache_dir=cache)
    (folder / "manifest.json").write_text('{"layer_ids": [1]}')
    with pytest.raises(ValueError, match="holds features, not blocks: name it with --feature_dir"):
        load_blocks(folder, tokenizer, cache_dir=cache)
    (folder / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no manifest.json"):
        load_blocks(folder, tokenizer, cache_dir=cache)


def test_an_empty_side_loads(tmp_path):
    manifest = run(tmp_path, many_rows(10), eval_fraction=0)
    assert manifest["eval"]["shards"] == 0 and manifest["eval"]["fill"] is None
    splits = load_blocks(tmp_path / "blocks", cache_dir=tmp_path / "cache")
    assert len(splits["eval"]) == 0 and splits["eval"].features == splits["train"].features


def test_a_folder_that_has_changed_is_other_input(tmp_path):
    (tmp_path / "chats").mkdir()

    def pack():
        options = {"max_seq_len": 160, "eval_fraction": 0, "progress": False}
        return pack_conversations(tmp_path / "chats", tmp_path / "blocks", chatml(), **options)

    write(tmp_path / "chats", many_rows(5))
    assert pack() == pack()
    for rows, name in ((many_rows(3), "chats.jsonl"), (many_rows(5), "others.jsonl")):
        write(tmp_path / "chats", rows, name)
        with pytest.raises(FileExistsError, match="blocks is there already"):
            pack()
        write(tmp_path / "chats", many_rows(5))
    (tmp_path / "chats" / "others.jsonl").unlink()
    assert pack()["conversations"]["read"] == 5


def test_another_run_leaves_the_output_alone(tmp_path):
    run(tmp_path, many_rows(20))
    before = (tmp_path / "blocks" / "manifest.json").read_bytes()
    with pytest.raises(FileExistsError, match="blocks is there already: delete it, or name another output"):
        run(tmp_path, many_rows(30))
    assert run(tmp_path, many_rows(20)) == json.loads(before)  # the same again finds it made
    assert (tmp_path / "blocks" / "manifest.json").read_bytes() == before
    (tmp_path / "empty").mkdir()
    run(tmp_path, many_rows(20), name="empty")


def test_a_chat_without_a_prompt_is_skipped_and_a_template_that_shows_none_stops_the_run(tmp_path):
    bare, empty = chatml("{% for m in messages %}{{ m.content }}{% endfor %}"), {"messages": chat("", "Hi")}
    counts = run(tmp_path, [empty, *many_rows(20)], bare)["conversations"]
    assert counts["skipped: every token is supervised"] == 1 and counts["read"] == 21
    fault = "every token is supervised in every conversation that could be read: the chat template of tokenizer 'tiny'"
    with pytest.raises(ValueError, match=fault):
        run(tmp_path, [empty, {"messages": chat("", "Ho")}, {}], bare, name="none")
    assert set(os.listdir(tmp_path)) == {"chats.jsonl", "blocks"}


def test_no_output_without_conversations(tmp_path):
    with pytest.raises(
        ValueError, match="no conversation left to train on: 2 read; 2 skipped: no messages .first in line 1"
    ):
        run(tmp_path, [{"messages": []}] * 2)
    with pytest.raises(ValueError, match="the file is empty"):
        run(tmp_path, [])
    for options in ({"max_seq_len": 7}, {"eval_fraction": 1.5}):
        with pytest.raises(ValueError, match="max_seq_len >= 8 and 0 <= eval_fraction <= 1"):
            run(tmp_path, many_rows(5), **options)
    assert os.listdir(tmp_path) == ["chats.jsonl"]


def test_the_report_and_the_sample(tmp_path, capsys):
    run(tmp_path, [*many_rows(20), {"messages": []}], progress=True)
    shown = capsys.readouterr().out
    assert "21 read; " in shown and "1 skipped: no messages (first in line 21: no messages)" in shown
    assert "⟦Answer 1.1 " in shown and re.search(r"fill \d\d\.\d%", shown)


def test_the_sample_is_a_whole_conversation_if_there_is_one(tmp_path, capsys):
    long = {"messages": chat("Hello", "x" * 500)}
    run(tmp_path, [long, {"messages": chat("Hello", "Hi")}], progress=True, eval_fraction=0)
    sample = capsys.readouterr().out.partition("brackets:\n")[2]
    assert sample == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n⟦Hi<|im_end|>⟧\n\n"
    run(tmp_path, [long], name="windows", progress=True, eval_fraction=0)
    assert "⟦xxx" in capsys.readouterr().out.partition("brackets:\n")[2]


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    chatml().save_pretrained(folder)
    return folder


def test_the_command(tmp_path, tokenizer_folder):
    options = ["--output", tmp_path / "blocks", "--max_seq_len", 160, "--tokenizer", tokenizer_folder]
    line = ["--input", write(tmp_path, many_rows(60)), *options, "--eval_fraction", 0.2]
    line = [sys.executable, "-m", "data.sequence_packing", *map(str, line)]
    done = subprocess.run(
        line, cwd=ROOT, text=True, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "utf-8"}
    )
    assert done.returncode == 0, done.stderr
    assert "60 read; " in done.stdout and "⟦Answer" in done.stdout
    run(tmp_path, many_rows(60), name="again")
    stored = [(tmp_path / name / "data" / "train-00000-of-00001.parquet").read_bytes() for name in ("blocks", "again")]
    assert stored[0] == stored[1]
    with pytest.raises(SystemExit, match="error: .* is there already: delete it, or name another output"):
        sequence_packing.main(["--input", str(tmp_path / "chats.jsonl"), *map(str, options)])
    with pytest.raises(SystemExit, match="error: There is no folder /nope, and a Hub id would read owner/model"):
        sequence_packing.main(["--input", "none.jsonl", "--output", "none", "--tokenizer", "/nope"])
    with pytest.raises(SystemExit, match="error: there is no file or folder none.jsonl"):
        sequence_packing.main(["--input", "none.jsonl", "--output", "none", "--tokenizer", str(tokenizer_folder)])


def test_the_stop_tokens_come_with_the_target(tmp_path, tokenizer_folder):
    """Without them the newline after Gemma's end of turn would be supervised; a made-up id shows that they are read."""
    tokenizer = chatml()
    stop = tokenizer.convert_tokens_to_ids("!")
    for content in ([stop], stop):
        tokenizer.save_pretrained(tmp_path / "target")
        (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": content}))
        path = write(tmp_path, [{"messages": chat(f"{i}", "Hi!")} for i in range(9)])
        output = tmp_path / f"blocks{type(content).__name__}"
        options = ["--input", str(path), "--output", str(output), "--tokenizer", str(tmp_path / "target")]
        sequence_packing.main([*options, "--eval_fraction", "0"])
        manifest = json.loads((output / "manifest.json").read_text())
        assert manifest["stop_token_ids"] == [stop] and manifest["train"]["supervised"] == 9 * 3  # H, i, !
    assert run(tmp_path, [{"messages": chat("a", "Hi!")}], eval_fraction=0)["train"]["supervised"] == 4


# Chunks of two blocks, and a stop in the middle of the file.
STALLED = """
import sys, time
from data import sequence_packing

def stalling(path, read=sequence_packing.read_rows):
    for number, row in read(path):
        if number == 40:
            print("stalled", flush=True)
            time.sleep(600)
        yield number, row

sequence_packing.CHUNK_TOKENS, sequence_packing.CHUNK_BLOCKS, sequence_packing.read_rows = 0, 2, stalling
sequence_packing.main(sys.argv[1:])
"""


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_killed_run_goes_on_and_makes_the_same_files(tmp_path, tokenizer_folder, monkeypatch):
    rows = [
        *many_rows(60),
        many_rows(3)[2],
        {"messages": []},
    ]  # the last but one is a duplicate of what was read before
    options = ["--input", write(tmp_path, rows), "--output", tmp_path / "blocks", "--max_seq_len", "160"]
    line = [sys.executable, "-c", STALLED, *options, "--tokenizer", tokenizer_folder]
    with subprocess.Popen(line, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == "stalled\n"
        process.kill()
    partial = tmp_path / "blocks.partial"
    assert len(list(partial.glob("chunk-*.json"))) > 2, "it was not killed in the middle"
    assert not (tmp_path / "blocks").exists() and not list(tmp_path.glob("**/manifest.json"))

    monkeypatch.setattr(sequence_packing, "CHUNK_TOKENS", 0)
    monkeypatch.setattr(sequence_packing, "CHUNK_BLOCKS", 2)
    options = {"stop_token_ids": [], "eval_fraction": 0.05}
    with pytest.raises(ValueError, match="unfinished run with another max_seq_len: delete it first"):
        run(tmp_path, rows, **options, max_seq_len=161)
    encoded = []
    monkeypatch.setattr(windows, "encode_conversation", lambda *a: encoded.append(a) or encode_conversation(*a))
    resumed = run(tmp_path, rows, **options)
    assert 0 < len(encoded) < 45, "it began anew"
    assert not partial.exists()
    whole = run(tmp_path, rows, name="whole", **options)
    assert resumed["conversations"] == whole["conversations"]
    assert whole["conversations"]["skipped: duplicate"] == whole["conversations"]["skipped: no messages"] == 1
    ours, theirs = contents(tmp_path / "blocks"), contents(tmp_path / "whole")
    for name, content in theirs.items():  # the manifest names the tokenizer by where it was loaded from
        assert ours[name] == content or name.name == "manifest.json"
    assert ours.keys() == theirs.keys()


def test_a_run_killed_while_it_finishes_goes_on(tmp_path, monkeypatch, small_chunks):
    rename = os.rename

    def failing(source, target):
        if str(target).endswith("blocks"):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(sequence_packing.os, "rename", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, many_rows(60))
    monkeypatch.setattr(sequence_packing.os, "rename", rename)
    run(tmp_path, many_rows(60))
    run(tmp_path, many_rows(60), name="whole")
    assert contents(tmp_path / "blocks") == contents(tmp_path / "whole")


def test_two_runs_do_not_write_one_output(tmp_path):
    (tmp_path / "blocks.partial" / "blocks").mkdir(parents=True)
    with FileLock(tmp_path / "blocks.partial" / "lock"):
        with pytest.raises(ValueError, match="another run is writing .*blocks: wait for it"):
            run(tmp_path, many_rows(5))
        assert (tmp_path / "blocks.partial" / "blocks").is_dir()  # it is the other run's
    run(tmp_path, many_rows(5))
    assert set(os.listdir(tmp_path)) == {"chats.jsonl", "blocks"}


def test_what_a_run_leaves_that_was_killed_at_its_very_end_is_removed(tmp_path, monkeypatch, small_chunks):
    rmtree = sequence_packing.shutil.rmtree

    def leave_the_partial_folder():
        monkeypatch.setattr(sequence_packing.shutil, "rmtree", lambda *_: None)
        made = run(tmp_path, many_rows(60))
        monkeypatch.setattr(sequence_packing.shutil, "rmtree", rmtree)
        assert (tmp_path / "blocks.partial" / "chunk-00000.json").exists()
        return made

    made = leave_the_partial_folder()
    assert run(tmp_path, many_rows(60)) == made and not (tmp_path / "blocks.partial").exists()
    rmtree(tmp_path / "blocks")
    leave_the_partial_folder()
    before = contents(tmp_path / "blocks")
    rmtree(tmp_path / "blocks")
    run(tmp_path, many_rows(60))  # not from the records of blocks that are gone
    assert contents(tmp_path / "blocks") == before and not (tmp_path / "blocks.partial").exists()
