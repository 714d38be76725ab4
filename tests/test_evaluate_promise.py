# ruff: noqa: F811 (fixtures that are imported)
"""The benchmark notices a wrong answer, says so plainly, and its command writes everything down."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from test_evaluate import (  # noqa: F401
    CHAIN,
    QUIET,
    TREE,
    drafter,
    drafters,
    prompts,
    target,
    tokenizer,
    write,
    wrong_accept,
)

import decoding_peagle
import evaluate_peagle
import sizing_peagle
from evaluate_peagle import EvaluationArguments, evaluate
from report_peagle import print_table
from sizing_peagle import Costs
from ways_peagle import answer, parting


@pytest.mark.parametrize("ways, temperature, broken", [(CHAIN, 0.0, True), (TREE, 0.5, False)])
def test_wrong_answers_are_noticed(
    target, tokenizer, drafter, prompts, monkeypatch, capsys, ways, temperature, broken
):
    monkeypatch.setattr(decoding_peagle.Continuation, "accept", wrong_accept)
    args = EvaluationArguments(ways=ways, temperature=temperature, **QUIET)
    report = evaluate(target, tokenizer, drafter, prompts[:2], args)
    assert [row["identical"] for row in report["ways"][ways[1]]["prompts"]] == [0, 0]
    assert report["promise_broken"] is broken
    print_table(report)
    out = capsys.readouterr().out
    assert f"!!! {ways[1]}: DRAFTED AND PLAIN ANSWERS DIFFER for p0, p1." in out and ("THIS IS A BUG" in out) is broken


def test_one_wrong_token_in_one_answer_of_one_way_is_enough(target, tokenizer, drafter, prompts, monkeypatch, capsys):
    def corrupt_last(target, way, ids, *args, **options):
        run = answer(target, way, ids, *args, **options)
        if way.name == "tree:4" and ids == prompts[3]["input_ids"]:
            run["tokens"][-1] += 1
        return run

    monkeypatch.setattr(evaluate_peagle, "answer", corrupt_last)
    report = evaluate(target, tokenizer, drafter, prompts, EvaluationArguments(ways=[*CHAIN, "tree:4"], **QUIET))
    assert [row["identical"] for row in report["ways"]["tree:4"]["prompts"]] == [1, 1, 1, 0]
    assert report["promise_broken"] and report["ways"]["tree:4"]["total"]["identical"] == 0.75
    assert report["ways"]["chain"]["total"]["identical"] == 1
    assert [row["identical"] for row in report["ways"]["tree:4"]["categories"].values()] == [1, 0.5]
    print_table(report)
    out = capsys.readouterr().out
    assert "!!! tree:4: DRAFTED AND PLAIN ANSWERS DIFFER for p3. THIS IS A BUG." in out and "!!! chain" not in out


def test_drafts_may_be_sized_by_cost(target, tokenizer, drafter, prompts, capsys, monkeypatch):
    # Measured on a busy machine, drafting may never pay.
    monkeypatch.setattr(sizing_peagle, "measure_costs", lambda *pair: Costs([1, 64], [1.0, 1.2], 0.01))
    args = EvaluationArguments(ways=["plain", "auto+lookup:3"], **QUIET)
    report = evaluate(target, tokenizer, drafter, prompts[:2], args)
    total = report["ways"]["auto+lookup:3"]["total"]
    assert total["identical"] == 1 and report["environment"]["costs"]["rows"][0] == 1 and len(total["joint"]) == 4
    assert 0 < total["drafting_rounds"] <= total["rounds"]
    print_table(report)
    out, pays = capsys.readouterr().out, total["break_even"]
    assert pays["needed_tau"] == pytest.approx(
        sum(pays[f"{part}_ms"] for part in ("verify", "draft", "host")) / pays["plain_ms"]
    )
    assert "auto+lookup:3 K=4 N=auto lookup=3" in out
    assert (
        f" {pays['needed_tau']:.2f} = ({pays['verify_ms']:.1f} + {pays['draft_ms']:.1f} + {pays['host_ms']:.1f})"
        in out
    )
    assert f" in {total['drafting_rounds']} of {total['rounds']}\n" in out


def test_auto_begins_without_what_the_warm_up_taught_it(target, tokenizer, drafter, prompts, monkeypatch):
    seen = []

    def record(target, way, *args, **options):
        seen.append(bool(sizing_peagle.HISTORIES.get(target, {}).get(drafter)))
        return answer(target, way, *args, **options)

    monkeypatch.setattr(sizing_peagle, "measure_costs", lambda *pair: Costs([1, 64], [1.0, 1.2], 0.01))
    monkeypatch.setattr(evaluate_peagle, "answer", record)
    sizing_peagle.history_of(target, drafter)  # somebody called before
    evaluate(target, tokenizer, drafter, prompts[:2], EvaluationArguments(ways=["plain", "auto"], **QUIET))
    # Warm-up, then plain and auto, then auto and plain: the first prompt begins afresh, the second goes on.
    assert seen == [True, True, False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wrong_answer_is_no_rounding_in_half_precision_either(
    target, tokenizer, drafter, prompts, monkeypatch, capsys, dtype
):
    monkeypatch.setattr(decoding_peagle.Continuation, "accept", wrong_accept)
    low = copy.deepcopy(target).to(dtype)
    report = evaluate(low, tokenizer, drafter, prompts[:1], EvaluationArguments(ways=CHAIN, **QUIET))
    assert report["environment"]["dtype"] == str(dtype).removeprefix("torch.")
    (row,) = report["ways"]["chain"]["prompts"]
    assert row["identical"] == 0 and report["promise_broken"]
    (parting,) = row["partings"]
    assert parting["position"] == 0 and parting["gap"] > 0.1 and not parting["near_tie"]
    print_table(report)
    out = capsys.readouterr().out
    words = f"p0: they part at new token 0 (from 0), NO near tie: the target's scores of the two are {parting['gap']} apart"
    assert "THIS IS A BUG" in out and words in out


def test_rounding_at_a_near_tie_is_no_broken_promise(target, tokenizer, drafter, prompts, monkeypatch, capsys):
    """A rounding that is provoked: the best two tokens change places where they are as near as bfloat16 can tell."""
    low, honest = copy.deepcopy(target).to(torch.bfloat16), decoding_peagle.Continuation.accept
    unit = torch.finfo(torch.bfloat16).eps

    def rounded(self, logits, drafts):
        values, best = logits.topk(2)
        near = values[:, 0] - values[:, 1] <= 3 * unit * logits.abs().amax(-1)
        logits = logits.scatter(1, best, torch.where(near[:, None], values.flip(1), values))
        return honest(self, logits, drafts)

    monkeypatch.setattr(decoding_peagle.Continuation, "accept", rounded)
    args = EvaluationArguments(ways=CHAIN, **QUIET | {"max_new_tokens": 20})
    report = evaluate(low, tokenizer, drafter, prompts, args)
    rows = report["ways"]["chain"]["prompts"]
    assert report["ways"]["chain"]["total"]["identical"] < 1 and not report["promise_broken"]
    partings = [parting for row in rows for parting in row["partings"]]
    assert len(partings) == sum(row["identical"] == 0 for row in rows)
    assert all(parting["near_tie"] and 0 <= parting["gap"] < 0.2 for parting in partings)
    print_table(report)
    out = capsys.readouterr().out
    words = "a near tie: the target's scores of the two are"
    assert "Rounding may do that" in out and out.count(words) == len(partings)


def test_an_answer_that_just_ends_is_explained_by_no_tie(target):
    assert parting(target, [1, 2], [3, 4], [3]) == {"position": 1, "gap": None, "near_tie": False}


def test_the_command_notices_from_any_folder(tmp_path, target, tokenizer, drafter):
    """The whole way in a process of its own: folders, the drafter's code in its folder (here a bad copy), exit status."""
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    with open(tmp_path / "drafter" / "decoding_peagle.py", "a") as code:
        code.write(
            "\n\nhonest_accept = Continuation.accept\n"
            "Continuation.accept = lambda self, logits, drafts: honest_accept(self, logits.roll(1, dims=-1), drafts)\n"
        )
    write(tmp_path, {"prompt": "Hello"}, {"prompt": "Bye", "category": "end", "id": 7})
    command = [
        sys.executable,
        evaluate_peagle.__file__,
        "--target",
        "target",
        "--drafter",
        "drafter",
        "--ways",
        *CHAIN,
    ]
    command += ["--prompts", "prompts.jsonl", "--max_new_tokens", "12", "--output", "results.json"]
    settings = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "[1/2] line 1" in done.stdout and "of prepacked plain decoding" in done.stdout
    assert "!!! chain: DRAFTED AND PLAIN ANSWERS DIFFER for line 1, 7. THIS IS A BUG." in done.stdout
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["promise_broken"] and report["environment"]["threads"] == 1
    assert [row["category"] for row in report["ways"]["chain"]["prompts"]] == ["none", "end"]
    assert report["ways"]["chain"]["drafter"] == "drafter"


def test_the_command_writes_everything_down(tmp_path, target, tokenizer, drafters, monkeypatch, capsys):
    monkeypatch.setattr(evaluate_peagle, "load_target", lambda name, dtype: (target, tokenizer))
    monkeypatch.setattr(evaluate_peagle, "load_drafter", lambda name: drafters[name == "owner/other"])
    path, output = write(tmp_path, {"prompt": "Hello"}, {"prompt": "Bye"}), tmp_path / "results.json"
    chats = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "hello!"}, {"role": "assistant", "content": "Hi."}]
    chats.write_text(json.dumps({"messages": chat}))
    command = (
        f"--drafter owner/name --sequential_drafter owner/other --prompts {path} --max_new_tokens 12 --prepack false"
    )
    command += f" --speculation_depth 2 --num_prompts 1 --ways plain chain tree:2 tree:3 sequential --output {output}"
    command += f" --trained_on {chats} --eval_fraction 0 --plots {tmp_path / 'plots'}"
    assert evaluate_peagle.main(command.split()) == 0
    out = capsys.readouterr().out
    assert "!!!" not in out and "1 of 1 prompts overlap the 1 training conversations." in out
    report = json.loads(output.read_text())
    assert list(report) == ["settings", "environment", "overlap", "ways", "promise_broken"]
    assert report["settings"].items() >= {"speculation_depth": 2, "max_new_tokens": 12, "prompts": str(path)}.items()
    assert report["settings"]["command"] == f"python evaluate_peagle.py {command}"
    assert set(report["environment"]) >= {"python", "torch", "transformers", "git", "cpu", "gpu", "threads", "dtype"}
    assert report["environment"]["dtype"] == "float32" and report["environment"]["cpu"]
    assert report["overlap"]["prompts"] == ["line 1"] and report["overlap"]["count"] == 1
    assert list(report["ways"]) == ["plain", "chain", "tree:2", "tree:3", "sequential"]
    chain = report["ways"]["chain"]
    assert list(chain) == ["drafter", "depth", "options", "total", "categories", "prompts"]
    assert set(chain["total"]) >= {"speed_up", "tau", "joint", "conditional", "intervals", "break_even", "round_ms"}
    assert len(chain["prompts"]) == 1 and len(chain["total"]["joint"]) == 2 and chain["total"]["identical"] == 1
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"acceptance.png", "categories.png", "sizes.png"}


@pytest.fixture
def stopped(tmp_path, target, tokenizer, drafters, monkeypatch):
    """Runs the command on three prompts until an error comes with so many answers, as they are counted from the warm-up on.
    Returns the exit status or the error's text, the report and what was answered."""
    rows = [{"prompt": text} for text in ("Hello", "Bye", "More")]
    path, output, seen, hooks = write(tmp_path, *rows), tmp_path / "results.json", [], len(target._forward_hooks)

    def run(*words, error=None, after=None):
        def answer_until(target, way, ids, *args, **options):
            if len(seen) == after:
                raise error
            seen.append((way.name, tokenizer.decode(ids)))
            return answer(target, way, ids, *args, **options)

        seen.clear()
        monkeypatch.setattr(evaluate_peagle, "load_target", lambda name, dtype: (target, tokenizer))
        monkeypatch.setattr(evaluate_peagle, "load_drafter", lambda name: drafters[name == "owner/other"])
        monkeypatch.setattr(evaluate_peagle, "answer", answer_until)
        command = (
            f"--ways plain chain --prompts {path} --max_new_tokens 4 --prepack false --quiet true --output {output}"
        )
        try:
            status = evaluate_peagle.main([*command.split(), *words])
        except (OSError, ValueError, MemoryError) as raised:
            status = str(raised)
        assert "generate" not in vars(target) and len(target._forward_hooks) == hooks
        return status, json.loads(output.read_text() or "null"), list(seen)

    run.answers = tmp_path / "results.json.answers.jsonl"
    return run


@pytest.mark.parametrize("error, status", [(KeyboardInterrupt(), 130), (MemoryError("no more"), "no more")])
def test_what_was_measured_before_it_stopped_is_kept(stopped, capsys, error, status):
    """The warm-up, the first prompt, one answer to the second."""
    ended, report, _ = stopped(error=error, after=5)
    assert ended == status and report["settings"]["interrupted"] is True
    assert [row["id"] for row in report["ways"]["chain"]["prompts"]] == ["line 1"]
    out = capsys.readouterr().out
    assert (status == 130) == ("INTERRUPTED: these are only the prompts" in out and "same command and --resume" in out)


@pytest.mark.parametrize("torn", [b"", b'{"id": "line 2", "runs": [{"pl'])
def test_a_stopped_measurement_goes_on(stopped, torn):
    """What is there is not asked again, and the report is that of all; a line that a kill cut short is."""
    stopped(error=KeyboardInterrupt(), after=5)
    with stopped.answers.open("ab") as file:
        file.write(torn)
    status, report, seen = stopped("--resume")
    assert (
        status == 0
        and [text.split("\n")[1].removesuffix("<|im_end|>") for _, text in seen[2:]] == ["Bye"] * 2 + ["More"] * 2
    )
    # The order goes on as well: A B, B A, A B after B A.
    assert [name for name, _ in seen[2:]] == ["chain", "plain"] + ["chain", "plain"]
    assert (report["settings"]["interrupted"], report["settings"]["sittings"]) == (False, 2)
    assert not stopped.answers.exists()
    _, whole, _ = stopped()
    assert whole["settings"]["sittings"] == 1
    for name, way in whole["ways"].items():
        for key in ("id", "tokens", "decoded", "rounds", "tau", "identical", "joint", "partings"):
            assert [row[key] for row in report["ways"][name]["prompts"]] == [row[key] for row in way["prompts"]]


def test_a_kill_costs_one_prompt(stopped, monkeypatch):
    """Even where no report could be written."""
    monkeypatch.setattr(evaluate_peagle, "summarize_ways", None)
    with pytest.raises(TypeError):
        stopped(error=KeyboardInterrupt(), after=7)
    made, *rows = map(json.loads, stopped.answers.read_text().splitlines())
    assert made["ways"] == ["plain", "chain"] and [row["id"] for row in rows] == ["line 1", "line 2"]


def test_only_the_same_measurement_goes_on(stopped):
    stopped(error=KeyboardInterrupt(), after=5)
    answers = stopped.answers.read_bytes()
    for words, message in (
        ([], "--resume it, or delete them"),
        (["--resume", "--max_new_tokens", "5"], "max_new_tokens 4, not 5"),
        (["--resume", "--num_prompts", "2"], "prompts '"),
        (["--resume", "--drafter", "owner/other", "--ways", "plain", "auto"], "drafters ['"),
    ):
        status, report, seen = stopped(*words)
        assert message in status and not seen and report["settings"]["interrupted"]
        assert stopped.answers.read_bytes() == answers
    stopped.answers.unlink()
    status, _, seen = stopped("--resume")
    assert "there is no" in status and not seen
    with pytest.raises(ValueError, match="--resume needs the --output"):
        EvaluationArguments(resume=True)


def test_a_table_that_fails_costs_no_measurement(tmp_path, target, tokenizer, drafter, monkeypatch):
    monkeypatch.setattr(evaluate_peagle, "load_target", lambda name, dtype: (target, tokenizer))
    monkeypatch.setattr(evaluate_peagle, "load_drafter", lambda name: drafter)
    monkeypatch.setattr(evaluate_peagle, "print_table", None)
    path, output = write(tmp_path, {"prompt": "Hello"}), tmp_path / "results.json"
    words = f"--ways plain chain --prompts {path} --max_new_tokens 4 --prepack false --quiet true --output {output}"
    with pytest.raises(TypeError):
        evaluate_peagle.main(words.split())
    assert json.loads(output.read_text())["settings"]["interrupted"] is False


def test_prompts_that_do_not_fit_are_named_first(target, tokenizer, drafter, prompts, monkeypatch):
    """Of 512 positions 12 are for the answer."""
    fits, long = ({"id": f"n{n}", "category": "a", "input_ids": [7] * n} for n in (500, 501))
    args = EvaluationArguments(ways=CHAIN, **QUIET)
    evaluate_peagle.check_lengths(target, [fits], args.max_new_tokens)
    monkeypatch.setattr(evaluate_peagle, "answer", None)
    with pytest.raises(ValueError, match=r"512 positions.* n501 \(513\)\. Leave"):
        evaluate(target, tokenizer, drafter, [*prompts, fits, long], args)


def test_folders_of_the_machine_are_not_told():
    root = str(evaluate_peagle.ROOT)
    told = {"drafter": root, "command": f"x --drafter {root} --output {root}/results/a.json", "other": f"{root}_2"}
    assert evaluate_peagle.without_folders(told) == {
        "drafter": ".",
        "command": "x --drafter . --output results/a.json",
        "other": f"{root}_2",
    }


@pytest.mark.parametrize("flag", ["--output", "--plots", "--prompts"])
def test_what_cannot_be_read_or_written_fails_first(tmp_path, monkeypatch, flag):
    monkeypatch.setattr(evaluate_peagle, "load_target", None)
    (tmp_path / "absent").touch()
    with pytest.raises(OSError, match="absent"):
        evaluate_peagle.main(["--drafter", "owner/name", flag, str(tmp_path / "absent" / "results.json")])


def test_a_folder_without_drafter_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no drafter in"):
        evaluate_peagle.main(["--drafter", str(tmp_path)])


def test_a_way_that_the_drafter_cannot_go_fails_before_the_target_is_loaded(monkeypatch):
    monkeypatch.setattr(evaluate_peagle, "load_target", None)
    with pytest.raises(ValueError, match="the depth is 99 in the way chain:99, but"):
        evaluate_peagle.main(["--ways", "plain", "chain:99"])
