"""The true acceptance length during training: which prompts, what is counted, and that the best checkpoint is kept.

All models are tiny and random; float32 on the CPU.
"""

import csv
import json

import numpy as np
import pytest
from conftest import PATTERNS, plain, prompt_of, scripted_for
from test_training import BLOCKS, block, build_target, build_trainer, changed, document, state

import trainer_peagle
from acceptance_peagle import decode, extrapolate, prompts_of


def test_prompts_are_what_comes_before_the_first_answer():
    first, second, third = (
        document(length, seed, prompt=prompt) for length, seed, prompt in ((9, 1, 4), (8, 2, 0), (7, 3, 6))
    )
    blocks = [block(first, second), block(document(5, 4, supervised=0), third)]
    assert [*prompts_of(blocks, 10)] == [first[0][:4], third[0][:6]]
    assert [*prompts_of(blocks, 5)] == [first[0][:4]]


@pytest.mark.parametrize(("pattern", "tau", "kept"), [("right", 5, [1, 1, 1, 1]), ("wrong", 1, [0])])
def test_a_drafter_that_is_always_right_or_wrong(llama, pattern, tau, kept):
    prompt = prompt_of(9)
    drafter = scripted_for(llama, prompt, pattern)
    metrics = decode(llama, drafter, [prompt[0].tolist()], 21)
    assert metrics.pop("tau") == tau
    assert metrics == {f"acceptance_depth_{depth}": share for depth, share in enumerate(kept)}


def test_acceptance_is_counted_where_all_before_was_kept(llama):
    prompt = prompt_of(9)
    drafter = scripted_for(llama, prompt, "mixed")
    metrics = decode(llama, drafter, [prompt[0].tolist()], 24)
    # What the rounds make of the pattern, by hand: up to the first wrong token, and those after it are not looked at.
    plan, rounds, left = PATTERNS["mixed"], [], 23  # the prefill gives one token
    while left > 0:
        start = 4 * len(rounds)
        right = [plan[(start + i) % len(plan)] for i in range(4)]
        rounds.append((right + [False]).index(False))
        left -= rounds[-1] + 1
    assert plain(llama, prompt).shape[1] == 9 + 24
    for depth in range(2):
        judged = [kept for kept in rounds if kept >= depth]
        assert metrics[f"acceptance_depth_{depth}"] == pytest.approx(
            sum(kept > depth for kept in judged) / len(judged), abs=0.1
        )


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def trained(folder, **options):
    target, prompts = build_target(), [document(6, seed)[0] for seed in (1, 2)]
    trainer = build_trainer(target, BLOCKS, folder, eval_blocks=[BLOCKS[0]], **EVALUATED | options)
    trainer.prompts = prompts
    trainer.train()
    return trainer


def test_every_evaluation_has_the_true_tau_in_the_state_and_on_the_curve(tmp_path):
    trainer = trained(tmp_path, eval_new_tokens=12)
    saved = json.loads((tmp_path / "checkpoint-6/trainer_state.json").read_text())
    evaluations = [entry for entry in saved["log_history"] if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [2, 4, 6]
    # Decoding with what was trained gives the last number again.
    again = decode(trainer.signals.target, trainer.model, trainer.prompts, 12)
    assert evaluations[-1]["eval_tau"] == round(again["tau"], 4)
    assert all(entry["eval_acceptance_depth_0"] <= 1 <= entry["eval_tau"] for entry in evaluations)
    with open(tmp_path / "learning_curve.csv") as file:
        rows = [*csv.DictReader(file)]
    assert [float(row["eval_tau"]) for row in rows] == [entry["eval_tau"] for entry in evaluations]
    tokens = [int(row["num_input_tokens_seen"]) for row in rows]
    assert tokens == sorted(tokens) and 0 < tokens[0] < tokens[-1]
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    made = json.loads((tmp_path / "learning_curve.json").read_text())
    assert made["settings"]["command"].startswith("python ") and made["environment"]["dtype"] == "float32"


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_checkpoint_of_the_best_tau_is_kept(tmp_path, monkeypatch, best):
    taus = [1.2, 1.3, 1.4]
    taus[best] = 1.9
    monkeypatch.setattr(trainer_peagle, "decode", lambda *args: {"tau": taus.pop(0)})
    trainer = trained(tmp_path, load_best_model_at_end=True)
    assert trainer.state.best_metric == 1.9
    for index, step in enumerate((2, 4, 6)):
        there = trainer.model.from_pretrained(tmp_path / f"checkpoint-{step}").state_dict()
        assert (changed(there, state(trainer)) == set()) == (index == best)


# Taus after so many tokens: one that nears 2.5, one that gains the same with every doubling.
CURVES = {
    "levelling": lambda tokens: 2.5 - 1.5 * (tokens / 1e5) ** -0.5,
    "steady": lambda tokens: 1.25 + 0.15 * np.log(tokens / 1e5),
}
TOKENS = np.geomspace(1e5, 3e6, 10)


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_without_noise_is_gone_on_with(name):
    curve = CURVES[name]
    tau, low, high = extrapolate(TOKENS.tolist(), curve(TOKENS).tolist())
    assert low - 0.01 <= tau <= high + 0.01 and high - low < 0.02
    assert tau == pytest.approx(curve(3e7), abs=0.02)
    assert extrapolate(TOKENS.tolist(), curve(TOKENS).tolist(), factor=2)[0] == pytest.approx(curve(6e6), abs=0.01)
    # A line in the logarithm, which knows nothing of levelling off, does for the steady one alone.
    line = np.polyval(np.polyfit(np.log(TOKENS), curve(TOKENS), 1), np.log(3e7))
    assert (abs(line - curve(3e7)) < 0.02) == (name == "steady")


@pytest.mark.parametrize("name", CURVES)
def test_the_interval_is_as_wide_as_the_noise_demands(name):
    """It holds the truth in most draws of the noise, and not the tau of the last point, from which it is to tell a gain."""
    curve, rng, held, stayed = CURVES[name], np.random.default_rng(0), 0, 0
    for _ in range(20):
        noise = rng.normal(size=len(TOKENS))
        _, low, high = extrapolate(TOKENS.tolist(), (curve(TOKENS) + 0.01 * noise).tolist(), draws=300)
        held, stayed = held + (low <= curve(3e7) <= high), stayed + (low <= curve(3e6))
        _, lower, higher = extrapolate(TOKENS.tolist(), (curve(TOKENS) + 0.04 * noise).tolist(), draws=300)
        assert higher - lower > 1.5 * (high - low)
    assert held >= 16 and stayed == 0


def test_too_few_points_tell_nothing():
    with pytest.raises(ValueError, match="five points"):
        extrapolate([1, 2, 3, 4], [1.0, 1.1, 1.2, 1.25])
