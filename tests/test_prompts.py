# ruff: noqa: F811 (fixtures that are imported)
"""The prompts of a benchmark: shapes of rows, bad rows, selection, and what training held out."""

import json

import pytest
from test_evaluate import make_tokenizer, target, tokenizer, write  # noqa: F401

from data.conversations import is_eval
from data.prompts import EVAL_FRACTION, held_out_prompts, load_prompts, overlap, read_prompts
from data.sequence_packing import pack_file
from evaluate_peagle import EvaluationArguments


def write_to(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))


def user(text):
    return [{"role": "user", "content": text}]


def test_three_shapes_of_rows(tmp_path, tokenizer):
    path = write(
        tmp_path,
        {"id": "x", "category": "chat", "messages": [{"role": "system", "content": None}, *user("Hi")]},
        "",
        {"prompt": "Hi"},
        {"question_id": 81, "category": "writing", "turns": ["Hi", "Say it in verse."]},
    )
    prompts = read_prompts(path, tokenizer)
    assert [(p["id"], p["category"]) for p in prompts] == [("x", "chat"), ("line 3", "none"), ("81", "writing")]
    plain = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert [tokenizer.decode(p["input_ids"]) for p in prompts[1:]] == [plain, plain]
    assert tokenizer.decode(prompts[0]["input_ids"]) == "<|im_start|>system\n<|im_end|>\n" + plain


@pytest.mark.parametrize(
    "row",
    [
        "{not json",
        "[1, 2]",
        {"text": "Hi"},
        {"prompt": ""},
        {"prompt": 3},
        {"turns": []},
        {"messages": []},
        {"messages": [*user("Hi"), {"role": "assistant", "content": "Hello"}]},
        {"messages": ["Hi", *user("Hi")]},
        {"messages": user(["Hi"])},
    ],
    ids=str,
)
def test_a_bad_row_is_named_by_its_line(tmp_path, tokenizer, row):
    path = write(tmp_path, {"prompt": "Hi"}, "", row)
    with pytest.raises(ValueError, match=f"{path.name}, line 3: "):
        read_prompts(path, tokenizer)


def test_a_missing_template_is_no_fault_of_a_row(tmp_path):
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="chat_template") as caught:
        read_prompts(write(tmp_path, {"prompt": "Hi"}), bare)
    assert "line" not in str(caught.value)


def test_selection(tmp_path, tokenizer):
    path = write(tmp_path, *({"prompt": f"{i}", "category": c, "id": f"{c}{i}"} for i, c in enumerate("aabbab")))

    def ids(*limits):
        return [prompt["id"] for prompt in load_prompts(path, None, tokenizer, None, *limits)]

    assert ids() == ["a0", "a1", "b2", "b3", "a4", "b5"]
    assert ids(None, 1) == ["a0", "b2"]
    assert ids(3, 2) == ["a0", "a1", "b2"]
    with pytest.raises(ValueError, match="No prompt is left to answer of the 6 in"):
        ids(0)


def test_the_shipped_prompts_are_read(tokenizer):
    prompts = load_prompts(EvaluationArguments().prompts, None, tokenizer, None)
    assert len(prompts) == 12 and len({prompt["category"] for prompt in prompts}) == 6


def test_held_out_prompts_are_those_of_training(tmp_path, tokenizer, target):
    rows = [{"messages": [*user(f"Question {i}"), {"role": "assistant", "content": "Yes."}]} for i in range(60)]
    path = write(tmp_path, *rows)
    split = {"max_seq_len": 512, "eval_fraction": 0.05}
    blocks, report = pack_file(path, tokenizer, **split, progress=False)
    prompts = held_out_prompts(path, tokenizer, target, EVAL_FRACTION)
    assert 0 < len(prompts) == report.counts["eval"] < 20
    held_out = tokenizer.decode([i for block in blocks["eval"] for i in block["input_ids"]])
    trained = tokenizer.decode([i for block in blocks["train"] for i in block["input_ids"]])
    for prompt in prompts:
        text = tokenizer.decode(prompt["input_ids"])
        assert text.startswith("<|im_start|>user\nQuestion ") and text.endswith("<|im_start|>assistant\n")
        assert text in held_out and text not in trained
        assert prompt["messages"] == user(text.removeprefix("<|im_start|>user\n").partition("<")[0])
    assert overlap(prompts, [path], EVAL_FRACTION)["count"] == 0
    assert overlap(prompts, [path], 0.0)["first_turn"] == [prompt["id"] for prompt in prompts]


# ---- what training has seen -----------------------------------------------------------------------------------------


def chat(question, answer="Yes.", *before):
    return {"messages": [*before, *user(question), {"role": "assistant", "content": answer}]}


def asked(tmp_path, tokenizer, *questions):
    return read_prompts(write(tmp_path, *({"prompt": question} for question in questions)), tokenizer)


def test_the_same_first_turn_is_found_whatever_its_signs(tmp_path, tokenizer):
    prompts = asked(tmp_path, tokenizer, "What is  TAU?", "What is tau in Greece?", "And then?")
    chats = tmp_path / "chats.jsonl"
    later = chat("Something else", "Well.", *user("First"), {"role": "assistant", "content": "Second"})
    later["messages"] += [*user("And then?"), {"role": "assistant", "content": "Nothing."}]
    write_to(chats, chat("what is tau"), later, {"messages": []})
    found = overlap(prompts, [chats], 0.0)
    assert found == {
        "files": [chats],
        "conversations": 2,
        "first_turn": ["line 1"],  # the third is a later turn there
        "run_of_words": [],
        "prompts": ["line 1"],
        "count": 1,
    }


def test_thirteen_words_in_a_row_are_found_and_twelve_are_not(tmp_path, tokenizer):
    words = [f"word{i}" for i in range(20)]
    prompts = asked(tmp_path, tokenizer, "Say: " + ", ".join(words[:13]), "Say " + " ".join(words[1:13]) + " again")
    chats = tmp_path / "chats.jsonl"
    for trained in (chat("Go on", f"So {' '.join(words)}."), chat(f"{' '.join(words)}?")):
        write_to(chats, trained)
        found = overlap(prompts, [chats], 0.0)
        assert (found["run_of_words"], found["first_turn"], found["count"]) == (["line 1"], [], 1)
    write_to(chats, chat("Go on", "Well.", {"role": "system", "content": " ".join(words)}))  # that many share
    assert overlap(prompts, [chats], 0.0)["count"] == 0


def test_what_training_held_out_it_has_not_seen(tmp_path, tokenizer):
    questions = [f"Question {i}" for i in range(40)]
    prompts, chats = asked(tmp_path, tokenizer, *questions), tmp_path / "chats.jsonl"
    write_to(chats, *map(chat, questions))
    kept = [f"line {i + 1}" for i, question in enumerate(questions) if not is_eval(user(question), 0.5)]
    assert 0 < len(kept) < 40 and overlap(prompts, [chats], 0.5)["prompts"] == kept
