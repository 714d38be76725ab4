"""The benchmark: what it counts, what it reads, and that a wrong answer does not go unnoticed."""

import json
import time
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
import torch
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


TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUIET = {"quiet": True, "max_new_tokens": 20, "prepack": False}  # packed layers this small are slower


def make_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|reserved|>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def random_prompt(seed, length=9):
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def target(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def prompts():
    return [{"id": f"p{i}", "category": "ab"[i % 2], "input_ids": random_prompt(i)} for i in range(4)]


@pytest.fixture(scope="module")
def drafter(target, tokenizer, prompts):
    """A random drafter that can propose a few of the target's own tokens only, so that it is right now and then."""
    counts = Counter()
    for prompt in prompts:
        ids = torch.tensor([prompt["input_ids"]])
        output = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        counts.update(output[0, ids.shape[1] :].tolist())
    draft_ids = torch.tensor(sorted(token for token, _ in counts.most_common(2)))
    config = PEagleConfig.for_target(target, tokenizer, mask_token_id=258, draft_vocab_size=2, num_depths=4)
    torch.manual_seed(0)
    return PEagleModel.from_target(target, config, draft_ids).eval()


@pytest.fixture(scope="module")
def report(target, tokenizer, drafter, prompts):
    return evaluate(target, tokenizer, drafter, prompts, EvaluationArguments(repeats=2, **QUIET | {"prepack": None}))


def write(folder, *rows):
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def wrong_accept(self, logits, drafts, honest=decoding_peagle.Continuation.accept):
    """The target's choices, each moved to the next token of the vocabulary."""
    return honest(self, logits.roll(1, dims=-1), drafts)


# ---- counts ---------------------------------------------------------------------------------------------------------


def test_tokens_rounds_and_forwards_add_up(report):
    rows, total = report["prompts"], report["total"]
    for row in [*rows, *report["categories"].values(), total]:
        assert row["emitted"] + row["answers"] == row["drafted_tokens"] == row["plain_tokens"]
        assert row["forwards_saved"] == row["plain_tokens"] - (row["answers"] + row["rounds"])
        assert row["tau"] == row["emitted"] / row["rounds"]
    for name in ("answers", "prompt_tokens", "drafted_tokens", "rounds", "emitted", "forwards_saved"):
        assert total[name] == sum(row[name] for row in rows)
        assert total[name] == sum(row[name] for row in report["categories"].values())
    assert (total["answers"], total["prompt_tokens"]) == (8, 72)
    assert total["tau"] != pytest.approx(sum(row["tau"] for row in rows) / len(rows))  # not a mean of ratios
    assert total["tau"] > 1  # else the drafter of this test is of no use to it
    assert report["total"]["identical"] and not report["promise_broken"]


def test_speeds_and_times_agree(report):
    total = report["total"]
    assert total["plain_tokens_per_second"] == pytest.approx((total["plain_tokens"] - 8) / total["plain_seconds"])
    assert total["drafted_tokens_per_second"] == pytest.approx(
        (total["drafted_tokens"] - 8) / total["drafted_seconds"]
    )
    assert total["speed_up"] == pytest.approx(total["drafted_tokens_per_second"] / total["plain_tokens_per_second"])
    assert total["speed_up"] == pytest.approx(total["tau"] / total["break_even_tau"])
    assert total["stock_tokens_per_second"] == pytest.approx((total["stock_tokens"] - 8) / total["stock_seconds"])
    assert total["speed_up_over_stock"] == pytest.approx(total["stock_ms"] / total["drafted_ms"])
    parts = [total[f"{name}_ms"] for name in ("draft", "verify", "host")]
    assert min(parts) > 0 and sum(parts) == pytest.approx(total["round_ms"])
    assert total["break_even_tau"] == pytest.approx(sum(parts) / total["plain_ms"])
    assert sum(total[f"{name}_share"] for name in ("draft", "verify", "host")) == pytest.approx(1)
    assert set(total["intervals"]) == {"tau", "speed_up", "speed_up_over_stock"}
    for name, interval in total["intervals"].items():
        assert interval[0] <= total[name] <= interval[1]


def test_forwards_are_those_the_target_made(target, drafter, prompts):
    calls = []
    handle = target.register_forward_hook(lambda *_: calls.append(1))
    with drafter.attach(target):
        run = answer_both_ways(
            target, drafter, prompts[0]["input_ids"], 3, 0, True, max_new_tokens=20, do_sample=False
        )
    handle.remove()
    total = summarize([run], 3)
    plain_forwards = total["plain_tokens"]
    assert len(calls) == plain_forwards + (plain_forwards - total["forwards_saved"])
    assert max(run["stats"].drafted) == 3


def test_acceptance_by_depth_of_known_rounds():
    # Kept 2 of 4, none of 4, 1 of 4 before a stop at the very next token (4 emitted, the last draft never judged), 1 of 1.
    stats = DecodingStats(drafted=[4, 4, 4, 1], accepted=[2, 0, 3, 1], emitted=[3, 1, 3, 2])
    run = {"prompt_tokens": 5, "plain": [7] * 10, "drafted": [7] * 10, "plain_seconds": 0.9, "drafted_seconds": 0.6}
    total = summarize([run | {"stats": stats}], 4)
    assert total["joint"] == [3 / 4, 2 / 3, 1 / 3, 0]
    assert total["conditional"] == [3 / 4, 2 / 2, 1 / 2, None]
    assert total["tau"] == 9 / 4 and total["forwards_saved"] == 10 - 1 - 4
    assert total["speed_up"] == pytest.approx(1.5) and total["plain_ms"] == pytest.approx(100)
    twice = summarize([run | {"stats": stats}] * 2, 4)
    assert [twice[name] for name in ("joint", "conditional", "tau", "answers")] == [
        total["joint"],
        total["conditional"],
        total["tau"],
        2,
    ]
    assert stats.emitted == [3, 1, 3, 2]  # summing leaves the runs alone


def test_rounds_that_drafted_are_told_from_the_others():
    """Of three rounds the second is plain; outside the forwards every one takes (1.0 - 0.2 - 0.6) / 3 seconds."""
    times = {"draft_times": [0.1, 0.0, 0.1], "verify_times": [0.2, 0.1, 0.3]}
    stats = DecodingStats(drafted=[2, 0, 3], nodes=[2, 0, 5], accepted=[2, 0, 1], emitted=[3, 1, 2], **times)
    run = {"prompt_tokens": 5, "plain": [7] * 7, "drafted": [7] * 7, "plain_seconds": 0.9, "drafted_seconds": 1.0}
    total = summarize([run | {"stats": stats}], 3)
    assert total["tau"] == 6 / 3 and total["joint"] == [2 / 2, 1 / 2, 0]
    assert total["drafting_rounds"] == 2 and total["drafting_tau"] == 5 / 2
    assert [total[f"drafting_{name}_ms"] for name in ("draft", "verify")] == pytest.approx([100, 250])
    assert total["drafting_break_even_tau"] == pytest.approx((100 + 250 + 200 / 3) / 150)


def test_an_answer_of_one_token_has_no_speed(target, tokenizer, drafter, prompts, capsys):
    report = evaluate(target, tokenizer, drafter, prompts, EvaluationArguments(**QUIET | {"max_new_tokens": 1}))
    total = report["total"]
    assert total["rounds"] == total["forwards_saved"] == 0 and total["identical"]
    assert total["tau"] is total["speed_up"] is total["intervals"] is None
    print_table(report)
    json.dumps(report, allow_nan=False)


def test_bootstrap(report):
    names = ("answers", "emitted", "rounds", "plain_tokens", "plain_seconds", "drafted_tokens", "drafted_seconds")
    rows = [dict(zip(names, (1, n, 10, n + 1, n / 20, n + 1, n / 30))) for n in (12, 18, 25, 31, 40)]
    intervals = bootstrap(rows)
    low, high = intervals["tau"]
    assert 1.2 < low < (12 + 18 + 25 + 31 + 40) / 50 < high < 4.0
    assert intervals["speed_up"] == pytest.approx([1.5, 1.5])  # every prompt is 1.5 times as fast
    assert intervals == bootstrap(rows)
    assert bootstrap(rows[:1])["tau"] == [1.2, 1.2]
    assert set(intervals) == {"tau", "speed_up"}
    with_stock = [
        row | {"stock_tokens": row["plain_tokens"], "stock_seconds": row["plain_seconds"] * 2} for row in rows
    ]
    assert bootstrap(with_stock) == intervals | {"speed_up_over_stock": pytest.approx([3.0, 3.0])}


# ---- how it measures ------------------------------------------------------------------------------------------------


def test_seeded_sampling_gives_equal_answers(target, tokenizer, drafter, prompts):
    tree = EvaluationArguments(temperature=1.0, draft_tree=4, **QUIET)
    hot = evaluate(target, tokenizer, drafter, prompts[:2], tree)
    assert hot["total"]["identical"]
    assert hot["settings"]["temperature"] == 1.0

    def answer(seed):
        with drafter.attach(target):
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 20}
            return answer_both_ways(target, drafter, prompts[0]["input_ids"], 4, seed, True, **options)["drafted"]

    assert answer(0) == answer(0) != answer(1)


def test_the_draws_of_a_sampled_chain_are_not_compared(target, tokenizer, drafter, prompts, capsys):
    hot = evaluate(target, tokenizer, drafter, prompts[:2], EvaluationArguments(temperature=1.0, **QUIET))
    assert not hot["total"]["identical"] and not hot["promise_broken"]
    print_table(hot)
    out = capsys.readouterr().out
    assert "the answers are not compared" in out and "!!!" not in out and "NO" not in out


def test_both_orders_take_turns_and_repeats_change_the_seed(target, tokenizer, drafter, prompts, monkeypatch):
    seen = []

    def record(*args, seed=None, plain_first=None, **options):
        if seed is not None:  # the warm-up gives them by position
            seen.append((plain_first, seed))
            args += (seed, plain_first)
        return answer_both_ways(*args, **options)

    monkeypatch.setattr(evaluate_peagle, "answer_both_ways", record)
    evaluate(
        target,
        tokenizer,
        drafter,
        prompts[:3],
        EvaluationArguments(repeats=2, seed=5, **QUIET | {"max_new_tokens": 3}),
    )
    assert seen == [(True, 5), (False, 6), (False, 5), (True, 6), (True, 5), (False, 6)]
    assert "generate" not in vars(target)  # detached again


def test_the_clock_runs_from_the_first_new_token_and_stops_while_text_is_shown(monkeypatch):
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(evaluate_peagle, "time", clock)

    def show_for(seconds):
        clock.now += seconds

    for show in (None, SimpleNamespace(put=lambda _: show_for(5.0), end=lambda: show_for(7.0))):
        watch = Stopwatch(show)
        watch.put(torch.tensor([[1, 2, 3]]))  # the prompt
        clock.now += 30.0  # the prefill
        watch.put(torch.tensor([4]))
        for _ in range(2):
            clock.now += 1.0
            watch.put(torch.tensor([4]))
        clock.now += 0.5
        watch.end()
        assert watch.seconds == pytest.approx(2.5)


def test_only_the_drafted_answer_is_shown(target, drafter, prompts):
    shown = []
    show = SimpleNamespace(put=lambda value: shown.extend(value.tolist()), end=lambda: shown.append("end"))
    with drafter.attach(target):
        options = {"max_new_tokens": 20, "do_sample": False, "show": show}
        run = answer_both_ways(target, drafter, prompts[0]["input_ids"], 4, 0, False, **options)
    assert shown == [*run["drafted"], "end"]


def test_a_busy_machine_is_reported(target, tokenizer, drafter, prompts, monkeypatch, capsys):
    args = EvaluationArguments(**QUIET | {"max_new_tokens": 2})
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(time, "process_time", lambda: 45.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (2.7, 9.0, 9.0))  # 0.75 of it our own
    report = evaluate(target, tokenizer, drafter, prompts[:1], args)
    assert report["environment"]["load_warning"] is None and "WARNING" not in capsys.readouterr().out
    monkeypatch.setattr(psutil, "getloadavg", lambda: (2.8, 0.0, 0.0))
    report = evaluate(target, tokenizer, drafter, prompts[:1], args)
    assert "do not trust" in report["environment"]["load_warning"]
    assert report["environment"]["load_of_others"] == pytest.approx(2.05)
    print_table(report)
    assert capsys.readouterr().out.count("WARNING: other programs keep 2.0 of 4 cores busy") == 2


# ---- prepacked layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain_first", [True, False])
def test_each_way_meets_its_own_layers(target, drafter, prompts, monkeypatch, plain_first):
    seen, generate = [], target.generate

    def record(*args, **options):
        seen.append(("custom_generate" in options, "forward" in vars(target.lm_head), "forward" in vars(drafter.fc)))
        return generate(*args, **options)

    monkeypatch.setattr(target, "generate", record)
    handle, options = prepack(target), {"max_new_tokens": 3, "do_sample": False}
    with handle, prepack(drafter), drafter.attach(target):
        ids, stock = prompts[0]["input_ids"], (False, False, True)
        run = answer_both_ways(target, drafter, ids, 4, 0, plain_first, prepacked=handle, **options)
    ways = [stock, (False, True, True), (True, True, True)]
    # What stood in the place of generate sees drafted calls too, with our decoding loop.
    assert seen == (ways if plain_first else ways[::-1])
    assert set(run) >= {"stock", "stock_seconds", "plain", "drafted", "stats"} and run["stock"] == run["plain"]


def test_float32_on_a_cpu_is_prepacked_and_restored(target, drafter, report):
    total, machine = report["total"], report["environment"]
    linears = [module for model in (target, drafter) for module in model.modules() if isinstance(module, nn.Linear)]
    assert report["settings"]["prepack"] is True and report["settings"]["dtype"] is None
    assert machine["prepacked_bytes"] == 4 * sum(linear.weight.numel() for linear in linears)
    assert not any("forward" in vars(linear) for linear in linears) and "generate" not in vars(target)
    assert total["same_as_stock"] == total["answers"] and total["stock_tokens"] == total["plain_tokens"]


def test_it_can_be_left_out(target, tokenizer, drafter, prompts, capsys):
    report = evaluate(target, tokenizer, drafter, prompts[:1], EvaluationArguments(**QUIET))
    assert report["settings"]["prepack"] is False and report["environment"]["prepacked_bytes"] == 0
    assert not [name for name in report["total"] if "stock" in name] and report["total"]["identical"]
    print_table(report)
    out = capsys.readouterr().out
    assert "stock" not in out and "prepacked" not in out and "one drafter forward" in out


def test_it_is_refused_where_it_cannot_be(target, tokenizer, drafter, prompts, monkeypatch):
    low = LlamaForCausalLM(target.config).to(torch.bfloat16).eval()
    with pytest.raises(ValueError, match="torch.bfloat16 on cpu"):
        evaluate(low, tokenizer, drafter, prompts[:1], EvaluationArguments(**QUIET | {"prepack": True}))
    monkeypatch.setattr(evaluate_peagle, "prepack", lambda model: prepack(low if model is drafter else model))
    with pytest.raises(ValueError, match="torch.bfloat16 on cpu"):
        evaluate(target, tokenizer, drafter, prompts[:1], EvaluationArguments(**QUIET | {"prepack": True}))
    assert "generate" not in vars(target) and "forward" not in vars(target.lm_head)


@pytest.mark.parametrize("words, value", [([], None), (["--prepack", "false"], False), (["--prepack", "true"], True)])
def test_the_flag(words, value):
    assert HfArgumentParser(EvaluationArguments).parse_args_into_dataclasses(words)[0].prepack is value


def test_another_stock_answer_breaks_no_promise(target, tokenizer, drafter, prompts, monkeypatch, capsys):
    def corrupt_stock(*args, **options):
        run = answer_both_ways(*args, **options)
        if args[2] == prompts[1]["input_ids"]:
            run["stock"][-1] += 1
        return run

    monkeypatch.setattr(evaluate_peagle, "answer_both_ways", corrupt_stock)
    report = evaluate(target, tokenizer, drafter, prompts[:2], EvaluationArguments(**QUIET | {"prepack": True}))
    assert [row["same_as_stock"] for row in report["prompts"]] == [1, 0]
    assert report["total"]["identical"] and not report["promise_broken"]
    print_table(report)
    out = capsys.readouterr().out
    assert "1 of its 2 answers are the same" in out and "!!!" not in out


def test_the_table_fits_a_terminal(report, capsys):
    wide = {"joint": [1.0] * 7, "conditional": [1.0] * 7, "drafted_tokens": 99999}
    rows = [row | wide for row in report["prompts"]]
    print_table(report | {"prompts": rows, "environment": report["environment"] | {"prepacked_bytes": 10**10}})
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120


def test_single_calls_are_timed(target, drafter, prompts, monkeypatch):
    seen, draft = [], drafter.draft

    def slow(input_ids, features, num_tokens, cache, embedding):
        seen.append((len(input_ids), features.shape[1], num_tokens, cache.get_seq_length()))
        time.sleep(0.002 * num_tokens)
        return draft(input_ids, features, num_tokens, cache, embedding)

    monkeypatch.setattr(drafter, "draft", slow)
    times = time_calls(target, drafter, prompts[0]["input_ids"], 4)
    assert seen == [(201, 200, 1, 0)] + [(2, 1, 1, 200), (2, 1, 4, 200)] * 20
    assert times["one_slot_ms"] > 2 and times["slots_ms"] > times["one_slot_ms"] + 4
    assert times["slots_ratio"] == times["slots_ms"] / times["one_slot_ms"]
    assert times["step_ratio"] == times["slots_ms"] / times["step_ms"] and times["step_ms"] > 0
