# ruff: noqa: F811 (fixtures that are imported)
"""The ways that the benchmark compares: what their names mean, and which names are refused."""

import pytest
from test_evaluate import QUIET, answer_in, drafter, drafters, prompts, target, tokenizer, way  # noqa: F401
from transformers import HfArgumentParser

from evaluate_peagle import EvaluationArguments, evaluate


def test_each_way_decodes_as_its_name_says(target, drafter, prompts, monkeypatch):
    seen, draft, ids = [], drafter.draft, prompts[0]["input_ids"]
    monkeypatch.setattr(drafter, "draft", lambda *args: seen.append(args[2]) or draft(*args))
    for name, depth, nodes in (
        ("chain:2", 2, 2),
        ("tree:7", 4, 7),
        ("chain", 4, 4),
        ("plain", 0, 0),
        ("lookup:3", 0, 3),
    ):
        seen.clear()
        run = answer_in(target, drafter, name, ids)
        assert max(seen, default=0) == depth and max(run["stats"].nodes) == nodes, name
    sizes = [way(name, drafter, depth=3, nodes=6).options for name in ("chain", "chain:2", "tree", "auto")]
    assert [(o["num_assistant_tokens"], o["draft_tree"]) for o in sizes] == [(3, None), (2, None), (3, 6), (3, "auto")]
    assert way("auto+lookup:3", drafter).options["prompt_lookup_num_tokens"] == 3
    assert way("tree:4+lookup", drafter).depth == way("lookup").depth == 10
    with pytest.raises(ValueError, match="the depth is 9 in the way chain:9, but this drafter was trained for 1 to 4"):
        way("chain:9", drafter)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"ways": ["plain", "wide"]}, "--ways has 'wide'"),
        ({"ways": ["plain", "chain:0"]}, "--ways has 'chain:0'"),
        ({"ways": ["plain", "auto:4"]}, "--ways has 'auto:4'"),
        ({"ways": ["plain", "lookup+lookup"]}, "--ways has 'lookup"),
        ({"ways": ["chain"]}, "needs plain"),
        ({"ways": ["plain", "tree", "tree"]}, "each way once"),
        ({"ways": ["plain", "sequential:2"]}, "need each other"),
        ({"ways": ["plain"], "sequential_drafter": "folder"}, "need each other"),
        ({"repeats": 0}, "--repeats is 0: give"),
        ({"speculation_depth": 0}, "--speculation_depth is 0: give"),
        ({"nodes": 0}, "--nodes is 0: give"),
        ({"max_new_tokens": -1}, "--max_new_tokens is -1: give"),
    ],
)
def test_wrong_ways_are_named(settings, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        EvaluationArguments(**settings)


def test_ways_by_default():
    usual = ["stock", "plain", "lookup", "chain", "tree", "auto"]
    assert EvaluationArguments().ways == usual
    assert EvaluationArguments(sequential_drafter="folder").ways == [*usual, "sequential"]
    words = "--ways plain chain:2 tree:15+lookup:10".split()
    assert HfArgumentParser(EvaluationArguments).parse_args_into_dataclasses(words)[0].ways == words[1:]


def test_the_sequential_way_asks_the_other_drafter(target, tokenizer, drafters, prompts, monkeypatch):
    asked = []
    for i, each in enumerate(drafters):
        draft = each.draft
        monkeypatch.setattr(each, "draft", lambda *args, i=i, draft=draft: asked.append((i, args[2])) or draft(*args))
    args = EvaluationArguments(ways=["plain", "chain:3", "sequential:2"], sequential_drafter="other", **QUIET)
    report = evaluate(target, tokenizer, drafters[0], prompts[:1], args, drafters[1])
    assert {(0, 3), (1, 2)} <= set(asked) <= {(0, k) for k in (1, 2, 3)} | {(1, 1), (1, 2)}
    assert report["ways"]["sequential:2"]["total"]["identical"] == 1 and "generate" not in vars(target)
    assert report["ways"]["sequential:2"]["options"] == {"num_assistant_tokens": 2}
    with pytest.raises(ValueError, match="way sequential:2 is of a drafter that drafts one token after the other"):
        evaluate(target, tokenizer, drafters[0], prompts[:1], args, drafters[0])
