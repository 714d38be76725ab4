# ruff: noqa: F401, F811 (fixtures that are imported)
"""The benchmark notices a wrong answer, says so plainly, and its command writes everything down."""

import copy
import json
import os
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
import torch
from test_evaluate import QUIET, drafter, prompts, report, target, tokenizer, write, wrong_accept
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import decoding_peagle
import evaluate_peagle
from configuration_peagle import PEagleConfig
from decoding_peagle import DecodingStats
from evaluate_peagle import (
    EvaluationArguments,
    Stopwatch,
    answer_both_ways,
    bootstrap,
    evaluate,
    print_table,
    summarize,
    time_calls,
)
from modeling_peagle import PEagleModel
from prepack_peagle import prepack


@pytest.mark.parametrize("changes, broken", [({}, True), ({"temperature": 0.5, "draft_tree": 4}, False)])
def test_wrong_answers_are_noticed(target, tokenizer, drafter, prompts, monkeypatch, capsys, changes, broken):
    monkeypatch.setattr(decoding_peagle.Continuation, "accept", wrong_accept)
    report = evaluate(target, tokenizer, drafter, prompts[:2], EvaluationArguments(**QUIET, **changes))
    assert not report["total"]["identical"] and not report["prompts"][0]["identical"]
    assert report["promise_broken"] is broken
    print_table(report)
    out = capsys.readouterr().out
    assert "!!! DRAFTED AND PLAIN ANSWERS DIFFER for p0, p1." in out and ("THIS IS A BUG" in out) is broken


def test_one_wrong_token_in_one_answer_is_enough(target, tokenizer, drafter, prompts, monkeypatch):
    def corrupt_last(*args, **options):
        run = answer_both_ways(*args, **options)
        if args[2] == prompts[3]["input_ids"]:
            run["drafted"][-1] += 1
        return run

    monkeypatch.setattr(evaluate_peagle, "answer_both_ways", corrupt_last)
    report = evaluate(target, tokenizer, drafter, prompts, EvaluationArguments(**QUIET))
    assert [row["identical"] for row in report["prompts"]] == [True, True, True, False]
    assert report["promise_broken"] and not report["total"]["identical"]
    assert report["categories"]["a"]["identical"] and not report["categories"]["b"]["identical"]


def test_drafts_may_be_sized_by_cost(target, tokenizer, drafter, prompts, capsys):
    report = evaluate(target, tokenizer, drafter, prompts[:2], EvaluationArguments(draft_tree="auto", **QUIET))
    total = report["total"]
    assert total["identical"] and report["environment"]["costs"]["rows"][0] == 1
    assert total["emitted"] + total["answers"] == total["drafted_tokens"] and len(total["joint"]) == 4
    assert 0 < total["drafting_rounds"] <= total["rounds"]
    print_table(report)
    out = capsys.readouterr().out
    parts = [total[f"drafting_{name}_ms"] for name in ("verify", "draft")] + [total["host_ms"]]
    assert f"in the {total['drafting_rounds']} of {total['rounds']} rounds that drafted: tau" in out
    assert "{:.1f} verification + {:.1f} drafter + {:.1f} Python".format(*parts) in out
    assert f") / {total['plain_ms']:.1f} ms of a plain token" in out
    with pytest.raises(ValueError, match="--draft_tree is 'wide'"):
        EvaluationArguments(draft_tree="wide")
    assert EvaluationArguments(draft_tree="12").draft_tree == 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wrong_answer_is_no_rounding_in_half_precision_either(
    target, tokenizer, drafter, prompts, monkeypatch, capsys, dtype
):
    monkeypatch.setattr(decoding_peagle.Continuation, "accept", wrong_accept)
    low = copy.deepcopy(target).to(dtype)
    report = evaluate(low, tokenizer, drafter, prompts[:1], EvaluationArguments(**QUIET))
    assert report["environment"]["dtype"] == str(dtype).removeprefix("torch.")
    assert not report["total"]["identical"] and report["promise_broken"]
    (parting,) = report["prompts"][0]["partings"]
    assert parting["position"] == 0 and parting["gap"] > 0.1 and not parting["near_tie"]
    print_table(report)
    out = capsys.readouterr().out
    assert (
        "THIS IS A BUG" in out
        and f"p0: they part at new token 0 (from 0), NO near tie: the target's scores of the two are {parting['gap']} apart"
        in out
    )


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
    report = evaluate(low, tokenizer, drafter, prompts, EvaluationArguments(**QUIET))
    assert not report["total"]["identical"] and not report["promise_broken"]
    partings = [parting for row in report["prompts"] for parting in row["partings"]]
    assert len(partings) == sum(not row["identical"] for row in report["prompts"])
    assert all(parting["near_tie"] and 0 <= parting["gap"] < 0.2 for parting in partings)
    print_table(report)
    out = capsys.readouterr().out
    assert "Rounding may do that" in out and out.count("a near tie: the target's scores of the two are") == len(
        partings
    )


def test_an_answer_that_just_ends_is_explained_by_no_tie(target):
    assert evaluate_peagle.parting(target, [1, 2], [3, 4], [3]) == {"position": 1, "gap": None, "near_tie": False}


@pytest.mark.parametrize(
    "speeds, words", [((0.8, 0.9), "slower than"), ((1.1, 1.3), "faster"), ((0.9, 1.1), "no clear")]
)
def test_the_verdict_is_plain(report, capsys, speeds, words):
    intervals = report["total"]["intervals"] | {"tau": [1.2, 1.6], "speed_up": list(speeds)}
    total = report["total"] | {"speed_up": sum(speeds) / 2, "intervals": intervals}
    print_table(report | {"total": total})
    out = capsys.readouterr().out
    assert f"\n{sum(speeds) / 2:.2f}x: {words}" in out and "plain decoding on this machine" in out
    for name in ("p0", "p3", "all a", "all b", "total"):
        assert f"\n{name} " in out
    assert (
        f"one drafter forward: {total['slots_ms']:.1f} ms for 4 slots, {total['slots_ratio']:.2f}x of one slot" in out
    )
    assert f"{total['speed_up_over_stock']:.2f}x over stock plain decoding" in out and "prepacked plain" in out
    assert (
        f"tau {report['total']['tau']:.2f} (1.20 to 1.60); drafting pays above tau {total['break_even_tau']:.2f}"
        in out
    )


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
    command = [sys.executable, evaluate_peagle.__file__, "--target", "target", "--drafter", "drafter"]
    command += ["--prompts", "prompts.jsonl", "--max_new_tokens", "12", "--output", "results.json"]
    settings = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "[1/2] line 1" in done.stdout and "plain decoding on this machine" in done.stdout
    assert "!!! DRAFTED AND PLAIN ANSWERS DIFFER for line 1, 7. THIS IS A BUG." in done.stdout
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["promise_broken"] and report["environment"]["threads"] == 1
    assert [row["category"] for row in report["prompts"]] == ["none", "end"]


def test_the_command_writes_everything_down(tmp_path, target, tokenizer, drafter, monkeypatch, capsys):
    monkeypatch.setattr(evaluate_peagle, "load_target", lambda name, dtype: (target, tokenizer))
    monkeypatch.setattr(evaluate_peagle, "load_drafter", lambda name: drafter)
    path, output = write(tmp_path, {"prompt": "Hello"}, {"prompt": "Bye"}), tmp_path / "results.json"
    options = ["--max_new_tokens", "12", "--speculation_depth", "2", "--num_prompts", "1", "--output", str(output)]
    assert evaluate_peagle.main(["--drafter", "owner/name", "--prompts", str(path), *options]) == 0
    assert "!!!" not in capsys.readouterr().out
    report = json.loads(output.read_text())
    assert set(report) == {"settings", "environment", "prompts", "categories", "total", "promise_broken"}
    assert report["settings"].items() >= {"speculation_depth": 2, "max_new_tokens": 12, "prompts": str(path)}.items()
    assert set(report["environment"]) >= {"python", "torch", "transformers", "git", "cpu", "gpu", "threads", "dtype"}
    assert report["environment"]["dtype"] == "float32" and report["environment"]["cpu"]
    assert set(report["total"]) >= {
        "speed_up",
        "tau",
        "joint",
        "conditional",
        "intervals",
        "break_even_tau",
        "plain_ms",
    }
    assert len(report["prompts"]) == 1 and len(report["total"]["joint"]) == 2 and report["total"]["identical"]


def test_an_output_that_cannot_be_written_fails_first(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_peagle, "load_target", None)
    with pytest.raises(FileNotFoundError, match="results.json"):
        evaluate_peagle.main(["--drafter", "owner/name", "--output", str(tmp_path / "absent" / "results.json")])


def test_a_folder_without_drafter_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no drafter in"):
        evaluate_peagle.main(["--drafter", str(tmp_path)])
