"""Windows and packed blocks: exact on hand-made chats, random chats, the real agent rows, files, and killed runs."""

import json
import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_conversations import (
    CALL,
    FAMILIES,
    PLAIN,
    TOOL,
    TOOLS,
    chat,
    chatml,
    make_tokenizer,
    smollm2,  # noqa: F401 (a fixture)
    supervised_runs,
    template_ids,
    write,
)

from data import sequence_packing
from data.collator import PackingCollator
from data.conversations import BadConversation, encode_conversation, read_jsonl
from data.sequence_packing import load_blocks, pack_conversations, pack_windows
from data.windows import cut_windows, find_turns, split_conversation


# The default system prompt of SmolLM2 and Qwen2.5: written where the chat has none.
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3: the last answer has an empty thought before it, and no other has.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last and m.role == 'assistant' %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Mistral: the system prompt is in the last user turn.
LATE_SYSTEM = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "{{ '[INST]' + (system + '\n\n' if loop.last or loop.nextitem is defined and loop.index >= loop.length - 1 else '') }}"
    "{{ m.content + '[/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    **{name: (lambda build=build: build(), end) for name, (build, end) in FAMILIES.items()},
    "plain": (lambda: make_tokenizer(PLAIN, ["<eos>"], eos="<eos>"), "\n"),
    "default system": (lambda: chatml(DEFAULT_SYSTEM), "<|im_end|>"),
    "tools": (lambda: chatml(TOOLS), "<|im_end|>"),
}


def encode(row, tokenizer, end=None):
    return encode_conversation(
        row, tokenizer, [tokenizer.convert_tokens_to_ids(end)] if end in tokenizer.get_vocab() else []
    )


def stretches(length, anchor, starts, max_seq_len):
    """The first token and the end of each window's stretch, from the windows of numbered tokens."""
    windows = cut_windows(range(length), [0] * length, anchor, starts, max_seq_len)
    found = []
    for window in windows:
        ids = window["input_ids"].tolist()
        assert ids[:anchor] == list(range(anchor))
        assert ids[anchor:] == list(range(ids[anchor], ids[-1] + 1)), "a stretch has a gap"
        found.append((ids[anchor], ids[-1] + 1))
    return found


def check(encoded, windows, anchor, starts, max_seq_len):
    """All that is promised about the windows of a chat that is too long."""
    ids, mask = encoded["input_ids"], np.array(encoded["loss_mask"])
    spans = stretches(len(ids), anchor, starts, max_seq_len)
    assert len(windows) == len(spans) > 1
    room, laid, covered = max_seq_len - anchor, np.zeros_like(mask), np.zeros(len(ids), bool)
    covered[:anchor] = True
    laid[:anchor] = windows[0]["loss_mask"][:anchor]
    for number, (window, (start, stop)) in enumerate(zip(windows, spans, strict=True)):
        assert window["input_ids"].tolist() == ids[:anchor] + ids[start:stop], "not the anchor and a stretch"
        assert len(window["loss_mask"]) == len(window["input_ids"]) <= max_seq_len
        assert number == 0 or not window["loss_mask"][:anchor].any(), "the system prompt is supervised"
        laid[start:stop] += window["loss_mask"][anchor:]
        covered[start:stop] = True
    assert covered.all(), "a token is in no window"
    assert (laid == mask).all(), "a token is supervised twice, or never, or wrongly"
    assert sum(int(window["loss_mask"].sum()) for window in windows) == mask.sum()
    half = room - room // 2
    for (start, stop), (following, _) in zip(spans, spans[1:]):
        assert stop - start == room, "only the last stretch may be short"
        assert abs(following - start - half) <= room // 4
        assert following in starts or following - start == half, "neither a turn nor the middle"
        nearest = min((abs(place - start - half) for place in starts), default=room)
        assert abs(following - start - half) == (nearest if nearest <= room // 4 else 0)
    assert spans[-1][1] - spans[-1][0] > room // 4, "degenerate last window"


# ---- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", [None, "Answer in verse."])
def test_a_window_reads_as_the_template_renders_the_system_prompt_and_its_turns(name, system):
    build, end = TEMPLATES[name]
    tokenizer = build()
    messages = chat(*(f"{'Question' if i % 2 == 0 else 'Answer'} {i}" for i in range(12)), system=system)
    row = {"messages": messages, "tools": [TOOL] if name == "tools" else None}
    encoded = encode(row, tokenizer, end)
    anchor, starts = find_turns(row, tokenizer)
    lead = messages[: len(messages) - 12]
    if name == "gemma" and system:  # the system prompt is inside the first user turn
        assert tokenizer.decode(encoded["input_ids"][:anchor]) == f"<bos><start_of_turn>user\n{system}\n\n"
        assert len(starts) == 5
    else:
        shown = tokenizer.decode(encoded["input_ids"][:anchor])
        assert (system or "") in shown and "Question" not in shown and not shown.rstrip().endswith(("user", "You:"))
        assert (name != "tools") or "get_tide" in shown
        assert len(starts) == 11
    compared = 0
    for max_seq_len in range(max(anchor * 2, 100), len(encoded["input_ids"]), 7):
        windows = split_conversation(row, encoded, tokenizer, max_seq_len)
        check(encoded, windows, anchor, starts, max_seq_len)
        spans = stretches(len(encoded["input_ids"]), anchor, starts, max_seq_len)
        for window, (start, _) in zip(windows[1:], spans[1:]):
            turn = (starts.index(start) + 1) * (12 // (len(starts) + 1)) if start in starts else None
            if turn is not None and not (name == "gemma" and turn % 2):  # Gemma's template wants the user first
                rendered = template_ids(tokenizer, [*lead, *messages[len(lead) + turn :]], tools=row["tools"])
                ids = window["input_ids"].tolist()
                assert ids == rendered[: len(ids)]
                compared += 1
    assert compared > 5


def test_a_turn_that_fills_a_window_is_cut_into_halves():
    tokenizer = chatml()
    row = {"messages": chat("Hello", "x" * 1000, system="Be brief.")}
    encoded = encode(row, tokenizer)
    anchor, starts = find_turns(row, tokenizer)
    assert tokenizer.decode(encoded["input_ids"][:anchor]) == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert [tokenizer.decode(encoded["input_ids"][place:])[:22] for place in starts] == ["<|im_start|>assistant\n"]
    windows = split_conversation(row, encoded, tokenizer, 100)
    check(encoded, windows, anchor, starts, 100)
    spans, room = stretches(len(encoded["input_ids"]), anchor, starts, 100), 100 - anchor
    steps = np.diff([start for start, _ in spans])
    assert set(steps[1:]) == {room - room // 2} and len(spans) > 15
    # Each window supervises what the one before it did not hold: the second half, to its end.
    for window, (start, stop), (_, seen) in zip(windows[2:], spans[2:], spans[1:]):
        expected = [0] * (anchor + seen - start) + [1] * (stop - seen)
        assert window["loss_mask"].tolist()[: len(expected)][: anchor + 900] == expected or stop == len(
            encoded["input_ids"]
        )
    assert "".join(run for w in windows for run in supervised_runs(w, tokenizer)) == "x" * 1000 + "<|im_end|>"


def test_one_turn_of_100k_tokens():
    tokenizer = chatml()
    row = {"messages": chat("Hello", "ab " * 34_000)}
    encoded = encode(row, tokenizer)
    windows = split_conversation(row, encoded, tokenizer, 4096)
    check(encoded, windows, *find_turns(row, tokenizer), 4096)
    assert len(windows) == 49


def test_a_chat_that_fits_is_its_own_window():
    tokenizer = chatml()
    row = {"messages": chat("Hello", "Hi")}
    encoded = encode(row, tokenizer)
    (window,) = split_conversation(row, encoded, tokenizer, len(encoded["input_ids"]))
    assert window["input_ids"].tolist() == encoded["input_ids"] and window["input_ids"].dtype == np.int32
    assert window["loss_mask"].tolist() == encoded["loss_mask"] and window["loss_mask"].dtype == np.int8
    assert len(split_conversation(row, encoded, tokenizer, len(encoded["input_ids"]) - 1)) == 2


def test_the_targets_own_tokens_are_cut_too():
    tokenizer = chatml()
    answer = tokenizer("Hi " * 50, add_special_tokens=False)["input_ids"]
    messages = chat("One", "First answer.", "Two", "replaced", system="Be brief.")
    row = {"messages": messages, "resp_ids": answer}
    encoded = encode(row, tokenizer)
    anchor, starts = find_turns(row, tokenizer)
    assert (
        len(starts) == 3
        and encoded["input_ids"][starts[-1] :]
        == template_ids(tokenizer, messages[:-1], add_generation_prompt=True)[starts[-1] :] + answer
    )
    windows = split_conversation(row, encoded, tokenizer, 80)
    check(encoded, windows, anchor, starts, 80)
    assert "".join(run for w in windows for run in supervised_runs(w, tokenizer)) == "Hi " * 50


def test_calls_and_results_are_turns():
    tokenizer = chatml(TOOLS)
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c", "content": "3 m"}
    row = {
        "messages": [*chat("Tide?", system="Pilot."), call, result, *chat("", "3 m.", "Thanks", "Bye")[1:]],
        "tools": [TOOL],
    }
    anchor, starts = find_turns(row, tokenizer)
    text = tokenizer.decode(encode(row, tokenizer)["input_ids"][anchor:])
    ids = encode(row, tokenizer)["input_ids"]
    assert text.startswith("<|im_start|>user\nTide?")
    roles = [re.match(r"<\|im_start\|>(\w+)\n", tokenizer.decode(ids[place:]))[1] for place in starts]
    assert roles == ["assistant", "tool", "assistant", "user", "assistant"]


def test_templates_without_turn_starts_are_cut_anywhere():
    """One answer of a thinking template: its prefixes are not the chat's, but anchor and windows are."""
    tokenizer = chatml(THINKING)
    row = {"messages": chat("Hello", "x" * 200, system="Be brief.")}
    encoded = encode(row, tokenizer)
    anchor, starts = find_turns(row, tokenizer)
    assert tokenizer.decode(encoded["input_ids"][:anchor]) == "<|im_start|>system\nBe brief.<|im_end|>\n"
    check(encoded, split_conversation(row, encoded, tokenizer, 90), anchor, starts, 90)


def test_what_cannot_be_cut_says_why():
    tokenizer = chatml()
    row = {"messages": chat("Hello", "x" * 200, system="s" * 60)}
    encoded = encode(row, tokenizer)
    anchor, _ = find_turns(row, tokenizer)
    with pytest.raises(
        BadConversation, match=f"system prompt too long: {anchor} tokens, which leave no quarter of 92"
    ):
        split_conversation(row, encoded, tokenizer, 92)
    assert split_conversation(row, encoded, tokenizer, -(-anchor * 4 // 3))
    late = make_tokenizer(LATE_SYSTEM, ["[INST]", "[/INST]", "<eos>"], eos="<eos>")
    row = {"messages": chat("One", "x" * 100, "Two", "Bye", system="Be brief.")}
    with pytest.raises(BadConversation, match="system prompt is not at the start of the chat"):
        find_turns(row, late)


ARBITRARY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOKENIZERS = {name: (build(), end) for name, (build, end) in TEMPLATES.items()}
texts = st.text(st.sampled_from("ab \n.é😀"), min_size=1, max_size=60).filter(str.strip)


@ARBITRARY
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    system=st.none() | texts,
    turns=st.lists(texts | texts.map(lambda text: text * 8), min_size=2, max_size=9),
    share=st.floats(0.02, 0.999),
)
def test_any_chat_in_any_window(name, system, turns, share):
    tokenizer, end = TOKENIZERS[name]
    row = {"messages": chat(*turns, system=system)}
    encoded = encode(row, tokenizer, end)
    max_seq_len = max(8, int(len(encoded["input_ids"]) * share))
    anchor, starts = find_turns(row, tokenizer)
    assert starts == sorted(set(starts)) and all(anchor < place < len(encoded["input_ids"]) for place in starts)
    if max_seq_len - anchor < max_seq_len / 4:
        with pytest.raises(BadConversation, match="system prompt too long"):
            split_conversation(row, encoded, tokenizer, max_seq_len)
    else:
        windows = split_conversation(row, encoded, tokenizer, max_seq_len)
        check(encoded, windows, anchor, starts, max_seq_len)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_lengths(data):
    length = data.draw(st.integers(9, 400))
    max_seq_len = data.draw(st.integers(8, length - 1))
    anchor = data.draw(st.integers(0, max_seq_len * 3 // 4))
    starts = sorted(data.draw(st.sets(st.integers(anchor + 1, length - 1), max_size=30)))
    mask = np.random.default_rng(length).integers(0, 2, length)
    mask[:anchor] = 0
    encoded = {"input_ids": list(range(length)), "loss_mask": mask}
    check(
        encoded,
        cut_windows(**encoded, anchor=anchor, starts=starts, max_seq_len=max_seq_len),
        anchor,
        starts,
        max_seq_len,
    )


@pytest.mark.parametrize("fault", ["lost window", "shifted mask", "supervised twice", "no anchor", "another token"])
def test_the_check_sees_faults(fault):
    """Negative controls of `check`."""
    tokenizer = chatml()
    row = {"messages": chat("Hello", "x" * 300, system="Be brief.")}
    encoded = encode(row, tokenizer)
    anchor, starts = find_turns(row, tokenizer)
    windows = split_conversation(row, encoded, tokenizer, 100)
    check(encoded, windows, anchor, starts, 100)
    if fault == "lost window":
        windows.pop()
    elif fault == "shifted mask":
        windows[0]["loss_mask"] = np.roll(windows[0]["loss_mask"], 1)
    elif fault == "supervised twice":
        windows[2]["loss_mask"][anchor] = 1
    elif fault == "no anchor":
        windows[1] = {name: column[anchor:] for name, column in windows[1].items()}
    else:
        windows[1]["input_ids"][anchor + 3] += 1
    with pytest.raises(AssertionError):
        check(encoded, windows, anchor, starts, 100)


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


@pytest.mark.parametrize("shard_blocks", [1024, 4])
def test_a_file_to_blocks_and_back(tmp_path, monkeypatch, shard_blocks):
    monkeypatch.setattr(sequence_packing, "SHARD_BLOCKS", shard_blocks)
    tokenizer, rows = chatml(), many_rows(200)
    bad = [{"messages": []}, rows[3], {"messages": chat("Hello", "x" * 500, system="s" * 150)}]
    manifest = run(tmp_path, rows + bad, tokenizer)
    counts = manifest["conversations"]
    assert counts["read"] == 203 == counts["train"] + counts["eval"] + 3
    assert counts["cut into windows"] == sum(len(encode(row, tokenizer)["input_ids"]) > 160 for row in rows) > 40
    assert {reason: n for reason, n in counts.items() if reason.startswith("skipped")} == {
        "skipped: no messages": 1,
        "skipped: duplicate": 1,
        "skipped: system prompt too long": 1,
    }
    assert json.loads((tmp_path / "blocks" / "manifest.json").read_text()) == manifest
    assert set(os.listdir(tmp_path)) == {"chats.jsonl", "blocks"}
    splits = load_blocks(tmp_path / "blocks", tokenizer, cache_dir=tmp_path / "cache")
    assert (manifest["train"]["shards"] > 5) == (shard_blocks == 4)
    expected = Counter()
    for row in rows:
        expected += as_documents(split_conversation(row, encode(row, tokenizer), tokenizer, 160))
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
    assert batch["cu_seq_lens_q"].diff().tolist() == lengths and len(batch["scored"])
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
    (folder / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no manifest.json"):
        load_blocks(folder, tokenizer, cache_dir=cache)


def test_an_empty_side_loads(tmp_path):
    manifest = run(tmp_path, many_rows(10), eval_fraction=0)
    assert manifest["eval"]["shards"] == 0 and manifest["eval"]["fill"] is None
    splits = load_blocks(tmp_path / "blocks", cache_dir=tmp_path / "cache")
    assert len(splits["eval"]) == 0 and splits["eval"].features == splits["train"].features


def test_another_run_leaves_the_output_alone(tmp_path):
    run(tmp_path, many_rows(20))
    before = (tmp_path / "blocks" / "manifest.json").read_bytes()
    with pytest.raises(FileExistsError, match="blocks is there already: delete it, or name another output"):
        run(tmp_path, many_rows(30))
    assert (tmp_path / "blocks" / "manifest.json").read_bytes() == before
    (tmp_path / "empty").mkdir()
    run(tmp_path, many_rows(20), name="empty")


@pytest.mark.parametrize(("value", "word"), [(0, "no token"), (1, "every token")])
def test_a_wrong_mask_stops_the_run(tmp_path, monkeypatch, value, word):
    def broken(*arguments):
        encoded = encode_conversation(*arguments)
        return {**encoded, "loss_mask": [value] * len(encoded["loss_mask"])}

    monkeypatch.setattr(sequence_packing, "encode_conversation", broken)
    with pytest.raises(ValueError, match=f"supervise {word}: the chat template of tokenizer 'tiny'"):
        run(tmp_path, many_rows(20))
    assert os.listdir(tmp_path) == ["chats.jsonl"]


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
    assert "⟦Answer 0.1 " in shown and "fill 0." in shown


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
    with pytest.raises(SystemExit, match="error: .*No such file"):
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


# Shards of two blocks, and a stop in the middle of the file.
STALLED = """
import sys, time
from data import sequence_packing

def stalling(path, read=sequence_packing.read_jsonl):
    for number, row in read(path):
        if number == 40:
            print("stalled", flush=True)
            time.sleep(600)
        yield number, row

sequence_packing.SHARD_BLOCKS, sequence_packing.read_jsonl = 2, stalling
sequence_packing.main(sys.argv[1:])
"""


def test_a_killed_run_leaves_nothing_that_looks_whole(tmp_path, tokenizer_folder):
    options = ["--input", write(tmp_path, many_rows(60)), "--output", tmp_path / "blocks", "--max_seq_len", "160"]
    line = [sys.executable, "-c", STALLED, *options, "--tokenizer", tokenizer_folder]
    with subprocess.Popen(line, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == "stalled\n"
        process.kill()
    assert list(tmp_path.glob("*.partial-*/blocks/data/*.parquet")), "it was not killed in the middle"
    assert not (tmp_path / "blocks").exists() and not list(tmp_path.glob("**/manifest.json"))
    run(tmp_path, many_rows(60), name="blocks")
    assert len(load_blocks(tmp_path / "blocks", cache_dir=tmp_path / "cache")["train"]) > 10


# ---- real rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_seq_len", "windows"), [(1024, 0), (2048, 184), (4096, 47)])
def test_real_agent_rows(max_seq_len, windows, smollm2, tmp_path):  # noqa: F811
    """20 chats behind a policy of 1343 tokens, which leaves no room in 1024."""
    path = SHARED / "data" / "formats" / "airline_tool_calls.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is missing")
    template, smollm2.chat_template = smollm2.chat_template, TOOLS
    try:
        reasons, found, at_turns = Counter(), 0, 0
        for _, row in read_jsonl(path):
            encoded = encode_conversation(row, smollm2)
            try:
                cut = split_conversation(row, encoded, smollm2, max_seq_len)
            except BadConversation as bad:
                reasons[bad.reason] += 1
                continue
            found += len(cut)
            if len(cut) > 1:
                anchor, starts = find_turns(row, smollm2)
                policy = template_ids(smollm2, row["messages"][:1])
                assert encoded["input_ids"][:anchor] == policy and len(starts) == len(row["messages"]) - 2
                check(encoded, cut, anchor, starts, max_seq_len)
                spans = stretches(len(encoded["input_ids"]), anchor, starts, max_seq_len)
                at_turns += sum(start in starts for start, _ in spans[1:])
        assert reasons == ({"system prompt too long": 20} if max_seq_len == 1024 else {})
        assert found == windows and (at_turns > 0.7 * (found - 20) or max_seq_len == 1024)
        options = {"max_seq_len": max_seq_len, "progress": False}
        if max_seq_len == 1024:
            with pytest.raises(ValueError, match="20 read; 20 skipped: system prompt too long .first in line 1"):
                pack_conversations(path, tmp_path / "blocks", smollm2, **options)
        else:
            manifest = pack_conversations(path, tmp_path / "blocks", smollm2, **options)
            assert manifest["train"]["windows"] + manifest["eval"]["windows"] == windows
    finally:
        smollm2.chat_template = template
