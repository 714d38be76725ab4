"""Prompts of many kinds: reproducible, all different, and accepted by `generate_data`."""

import ast
import json
from collections import Counter

import pytest

from data.plans import plan_row
from data.prompt_sets import library_functions, main, make_prompts, read_chats


ANSWER = "A river carries sand to the sea. The sea carries it along the coast until a bay is filled. " * 4
TEXT_KINDS = {"translation", "summary", "rag", "extraction"}


def chat(question="Why are there beaches?", answer=ANSWER):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_the_same_command_gives_the_same_file_and_another_seed_another(tmp_path, capsys):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat(f"Question {i}?")) + "\n" for i in range(5)))
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        main(
            [
                "--output",
                str(tmp_path / name),
                "--num_prompts",
                "130",
                "--seed",
                str(seed),
                "--chats",
                str(tmp_path / "chats.jsonl"),
            ]
        )
        files.append((tmp_path / name).read_text())
    assert files[0] == files[1] != files[2]
    assert "130 prompts; 10 qa, 10 maths" in capsys.readouterr().out


def test_every_prompt_is_of_a_kind_different_and_plannable():
    rows = list(make_prompts(390, 0, [("Why are there beaches?", ANSWER), ("And deserts?", ANSWER[::-1])]))
    assert set(Counter(row["category"] for row in rows).values()) == {30}
    texts = [row["turns"][0] if "turns" in row else row["messages"][0]["content"] for row in rows]
    assert len(set(texts)) == 390 == len({row["id"] for row in rows})
    for row, text in zip(rows, texts):
        plan = plan_row(row, None)  # what generate_data makes of it
        assert plan["messages"][0] == {"role": "user", "content": text} and plan["messages"][-1] == {
            "role": "assistant"
        }
        assert bool(plan["tools"]) == (row["category"] == "tools")
        assert row["category"] in ("code", "coding", "extraction") or not set("{}") & set(text)  # no blank stayed open
    asked = [text for row, text in zip(rows, texts) if row["category"] == "rag"]
    assert all("Why are there beaches?" in text or "And deserts?" in text for text in asked)


def test_without_chats_there_is_no_text_to_work_on():
    kinds = {row["category"] for row in make_prompts(90, 0, [])}
    assert len(kinds) == 9 and not kinds & TEXT_KINDS


def test_a_long_chat_gives_what_it_began_with(tmp_path):
    row = chat("The first question?")
    row["messages"] = [{"role": "system", "content": "Be kind."}, *row["messages"], *chat("And another?")["messages"]]
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + '\n{"messages": [5]}\n{"messages": 5}\n')
    assert read_chats(tmp_path / "chats.jsonl") == [("The first question?", ANSWER.strip())]


def test_more_prompts_than_there_are_end_with_a_reason():
    with pytest.raises(ValueError, match="only .* different ones"):
        list(make_prompts(10**5, 0, []))


def test_chats_of_no_use_are_named(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(
        json.dumps(chat(answer="Short.")) + "\nnot json\n" + json.dumps(chat(answer="I'm sorry. " * 99)) + "\n"
    )
    with pytest.raises(ValueError, match="no answer of 300 characters"):
        read_chats(path)
    with pytest.raises(SystemExit, match="error: .*No such file"):
        main(["--output", str(tmp_path / "o"), "--chats", str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit, match="--num_prompts is -5"):
        main(["--output", str(tmp_path / "o"), "--num_prompts", "-5"])
    assert not (tmp_path / "o").exists()


def test_code_comes_without_what_tells_the_answer():
    functions = library_functions()
    assert len(functions) > 200
    assert not any(ast.get_docstring(ast.parse(function["code"]).body[0]) for function in functions)
