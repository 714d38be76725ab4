"""The benchmark: what it counts, what it reads, and that all ways are measured alike."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import make_drafter, make_target, prompt_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import decoding_peagle
import evaluate_peagle
import ways_peagle
from configuration_peagle import PEagleConfig
from evaluate_peagle import EvaluationArguments, evaluate
from modeling_peagle import PEagleModel
from prepack_peagle import prepack
from report_peagle import print_table
from ways_peagle import Watch, Way, answer, in_turn, plain_steps


TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUIET = {"quiet": True, "max_new_tokens": 12, "prepack": False}  # packed layers this small are slower
CHAIN, TREE = ["plain", "chain"], ["plain", "tree:4"]


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
def drafters(target, tokenizer, prompts):
    """Random drafters, parallel and sequential, that can propose a few of the target's own tokens only, so that they are right
    now and then."""
    counts = Counter()
    for prompt in prompts:
        ids = torch.tensor([prompt["input_ids"]])
        output = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        counts.update(output[0, ids.shape[1] :].tolist())
    draft_ids = torch.tensor(sorted(token for token, _ in counts.most_common(2)))
    torch.manual_seed(0)
    sizes = {"mask_token_id": 258, "draft_vocab_size": 2, "num_depths": 4}
    configs = [PEagleConfig.for_target(target, tokenizer, parallel_drafting=kind, **sizes) for kind in (True, False)]
    return [PEagleModel.from_target(target, config, draft_ids).eval() for config in configs]


@pytest.fixture(scope="module")
def drafter(drafters):
    return drafters[0]


@pytest.fixture(scope="module")
def report(target, tokenizer, drafters, prompts):
    ways = ["stock", "plain", "lookup", "chain", "tree:4", "sequential:2"]
    args = EvaluationArguments(
        ways=ways, sequential_drafter="other", **QUIET | {"prepack": None, "max_new_tokens": 20}
    )
    return evaluate(target, tokenizer, drafters[0], prompts, args, drafters[1])


def write(folder, *rows):
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def wrong_accept(self, logits, drafts, honest=decoding_peagle.Continuation.accept):
    """The target's choices, each moved to the next token of the vocabulary."""
    return honest(self, logits.roll(1, dims=-1), drafts)


def way(name, drafter=None, **settings):
    return Way.named(name, drafter, **settings)


def answer_in(target, drafter, name, ids, seed=0, show=None, **options):
    options = {"do_sample": False, "max_new_tokens": 20} | options
    with drafter.attach(target):
        return answer(target, way(name, drafter), ids, seed, show=show, **options)


# ---- counts ---------------------------------------------------------------------------------------------------------


def test_tokens_and_rounds_add_up(report):
    for each in report["ways"].values():
        rows, total = each["prompts"], each["total"]
        for row in [*rows, *each["categories"].values(), total]:
            assert row["tau"] == row["decoded"] / row["rounds"]
        for name in ("answers", "tokens", "decoded", "rounds", "drafting_rounds"):
            assert total[name] == sum(row[name] for row in rows)
            assert total[name] == sum(row[name] for row in each["categories"].values())
        assert total["answers"] == 4 and total["identical"] == 1
    ways = {name: each["total"] for name, each in report["ways"].items()}
    assert len({total["tokens"] for total in ways.values()}) == 1
    assert ways["plain"]["tau"] == ways["stock"]["tau"] == 1 and ways["plain"]["joint"] == []
    assert ways["chain"]["decoded"] == ways["chain"]["tokens"] - 4  # the first comes from the prefill
    assert min(ways[name]["tau"] for name in ("lookup", "chain", "tree:4")) > 1  # else they are of no use to this test
    assert not report["promise_broken"]


def test_speeds_and_times_agree(report):
    ways = {name: each["total"] for name, each in report["ways"].items()}
    plain, stock = ways["plain"], ways["stock"]
    for total in ways.values():
        assert total["tokens_per_second"] == pytest.approx(1000 * total["tau"] / total["round_ms"])
        seconds = (total["prefill_ms"] * total["answers"] + total["round_ms"] * total["rounds"]) / 1000
        assert total["end_to_end_tokens_per_second"] == pytest.approx(total["tokens"] / seconds)
        for prefix in ("", "end_to_end_"):
            pace = total[f"{prefix}tokens_per_second"]
            assert total[f"{prefix}speed_up"] == pytest.approx(pace / plain[f"{prefix}tokens_per_second"])
            assert total[f"{prefix}speed_up_over_stock"] == pytest.approx(pace / stock[f"{prefix}tokens_per_second"])
        assert total["fraction_of_ideal"] == pytest.approx(total["speed_up"] / total["tau"])
        assert total["draft_ms"] + total["verify_ms"] + total["host_ms"] == pytest.approx(total["round_ms"])
        assert min(total["verify_ms"], total["host_ms"], total["prefill_ms"]) > 0
        assert total["peak_memory_bytes"] is None  # on a CPU it is that of the run
    assert report["environment"]["process_peak_bytes"] > 10e6
    for name in ("chain", "tree:4", "sequential:2"):
        assert ways[name]["draft_ms"] > 0
    assert plain["draft_ms"] == ways["lookup"]["draft_ms"] == 0 and plain["break_even"] is None


def test_forwards_are_those_the_target_made(target, drafter, prompts):
    calls = []
    handle = target.register_forward_hook(lambda *_: calls.append(1))
    for name in ("plain", "lookup", "chain:3", "tree:4"):
        calls.clear()
        run = answer_in(target, drafter, name, prompts[0]["input_ids"])
        assert len(calls) == 1 + len(run["stats"].emitted)
        assert sum(run["stats"].emitted) == run["decoded"]
        assert len(run["round_seconds"]) == len(run["stats"].emitted)
        assert 0 < sum(run["round_seconds"]) <= run["decode_seconds"] and min(run["round_seconds"]) > 0
        assert max(run["stats"].drafted) == {"plain": 0, "lookup": 10, "chain:3": 3, "tree:4": 4}[name]
    handle.remove()


def test_rounds_of_prompt_lookup_are_read_off_its_forwards(target):
    """Kept 2 of 3, none of 2, none of none, and at the end all of 2, where a stop came with the second."""
    watch = Watch(target)
    watch.drafts = [torch.tensor(d) for d in ([9, 9], [5, 6, 7], [5, 6], [], [8, 2])]
    watch.puts, watch.forward_seconds = [[1, 1], [3], [5, 6, 9], [4], [4], [8, 2]], [9.0, 0.1, 0.2, 0.3, 0.4]
    stats = watch.rounds()
    assert (stats.drafted, stats.accepted, stats.emitted) == ([3, 2, 0, 2], [2, 0, 0, 2], [3, 1, 1, 2])
    assert stats.verify_times == [0.1, 0.2, 0.3, 0.4]


def test_prompt_lookup_may_give_several_tokens_before_the_clock_starts(target, drafter, prompts):
    """A prompt that the answer repeats: transformers drafts in its first forward, too."""
    ids = prompts[0]["input_ids"]
    tokens = answer_in(target, drafter, "plain", ids)["tokens"]
    longer = ids + tokens[:12]  # the target goes on as before
    run = answer_in(target, drafter, "lookup", longer, max_new_tokens=8)
    assert run["tokens"] == tokens[12:] and run["decoded"] == sum(run["stats"].emitted) <= 7


def test_an_answer_of_one_token_has_no_speed(target, tokenizer, drafter, prompts, capsys):
    args = EvaluationArguments(ways=CHAIN, **QUIET | {"max_new_tokens": 1})
    report = evaluate(target, tokenizer, drafter, prompts, args)
    total = report["ways"]["chain"]["total"]
    assert total["rounds"] == 0 and total["identical"] == 1 and total["end_to_end_speed_up"] > 0
    assert total["tau"] is total["speed_up"] is total["geometric_mean"]["speed_up"] is None
    assert total["intervals"]["tau"] == [None, None]
    print_table(report)
    json.dumps(report, allow_nan=False)


# ---- how it measures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ways", [["a"], ["a", "b"], list("abcde")])
def test_every_way_has_every_place_early_and_late(ways):
    turns = [in_turn(ways, turn) for turn in range(4 * len(ways))]
    for half in (turns[: 2 * len(ways)], turns[2 * len(ways) :]):
        for places in zip(*half):
            assert Counter(places) == dict.fromkeys(ways, 2)
    for there, back in zip(turns[::2], turns[1::2]):
        assert there == back[::-1]


def test_ways_take_turns_and_repeats_change_the_seed(target, tokenizer, drafter, prompts, monkeypatch):
    seen = []

    def record(target, way, ids, seed, prepacked=None, show=None, **options):
        seen.append((way.name, seed))
        return answer(target, way, ids, seed, prepacked, show, **options)

    monkeypatch.setattr(evaluate_peagle, "answer", record)
    monkeypatch.setattr(evaluate_peagle, "plain_steps", lambda *_: lambda: seen.append("step") or 0.1)
    args = EvaluationArguments(ways=["plain", "chain", "lookup"], repeats=2, seed=5, **QUIET | {"max_new_tokens": 3})
    report = evaluate(target, tokenizer, drafter, prompts[:2], args)
    # The warm-up comes before.
    order = ["plain chain lookup", "lookup chain plain", "chain lookup plain", "plain lookup chain"]
    turns, steps = [[(name, 5 + turn % 2) for name in names.split()] for turn, names in enumerate(order)], ["step"] * 5
    assert seen[3:] == [*steps, *turns[0], *turns[1], *steps, *turns[2], *turns[3], *steps]
    assert report["ways"]["chain"]["total"]["answers"] == 4 and report["ways"]["chain"]["prompts"][0]["tokens"] == 6
    assert "generate" not in vars(target) and not target._forward_hooks  # as it was


def test_seeded_sampling_gives_equal_answers_in_trees(target, tokenizer, drafter, prompts):
    ways = ["plain", "tree:4", "chain+lookup:3"]
    hot = evaluate(target, tokenizer, drafter, prompts[:2], EvaluationArguments(temperature=1.0, ways=ways, **QUIET))
    assert [each["total"]["identical"] for each in hot["ways"].values()] == [1, 1, 1]
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0}

    def draw(seed):
        return answer_in(target, drafter, "tree:4", prompts[0]["input_ids"], seed, **options)["tokens"]

    assert draw(0) == draw(0) != draw(1)


def test_other_draws_are_not_compared(target, tokenizer, drafter, prompts, capsys):
    args = EvaluationArguments(temperature=1.0, ways=["plain", "chain", "lookup"], **QUIET)
    hot = evaluate(target, tokenizer, drafter, prompts[:2], args)
    assert [each["total"]["identical"] for each in hot["ways"].values()] == [1, None, None]
    assert not hot["promise_broken"]
    print_table(hot)
    out = capsys.readouterr().out
    assert out.count("the answers are not compared") == 2 and "!!!" not in out


def test_the_clock_runs_from_the_call_and_stops_while_text_is_shown(target, monkeypatch):
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(ways_peagle, "time", clock)

    def show_for(seconds):
        clock.now += seconds

    for show in (None, SimpleNamespace(put=lambda _: show_for(5.0), end=lambda: show_for(7.0))):
        with Watch(target, show) as watch:
            clock.now += 1.0
            watch.put(torch.tensor([[1, 2, 3]]))  # the prompt
            clock.now += 30.0  # the prefill
            watch.put(torch.tensor([4]))
            for _ in range(2):
                clock.now += 1.0
                watch.put(torch.tensor([4]))
            clock.now += 0.5
            watch.end()
        assert watch.round_seconds([1, 1]) == pytest.approx([1.0, 1.0]) and watch.round_seconds([2]) == [2.0]
        assert (watch.prefill_seconds, watch.decode_seconds) == pytest.approx((31.0, 2.5))


def test_only_one_answer_is_shown(target, tokenizer, drafter, prompts, capsys):
    evaluate(target, tokenizer, drafter, prompts[:1], EvaluationArguments(ways=TREE, **QUIET | {"quiet": False}))
    shown = capsys.readouterr().out
    run = answer_in(target, drafter, "plain", prompts[0]["input_ids"], max_new_tokens=12)
    text = tokenizer.decode(run["tokens"], skip_special_tokens=True)
    assert "\n[1/1] p0\n" in shown and shown.count(text) == 1 and tokenizer.decode(prompts[0]["input_ids"]) in shown


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma3_composite"])
def test_other_families_and_windows(name):
    """Every way gives the plain answer, and the repeated plain steps are one and the same, beyond a window, too."""
    target, rows = make_target(name), []
    drafter, ids = make_drafter(target), prompt_of(12)[0].tolist()
    runs = [
        answer_in(target, drafter, each, ids, max_new_tokens=6) for each in ("plain", "lookup", "chain:2", "tree:4")
    ]
    assert [run["tokens"] for run in runs] == [runs[0]["tokens"]] * 4
    assert [sum(run["stats"].emitted) for run in runs] == [run["decoded"] for run in runs]
    step = plain_steps(target, ids)
    handle = target.register_forward_hook(lambda module, args, outputs: rows.append(outputs.logits[0, -1]))
    assert min(step() for _ in range(3)) > 0
    handle.remove()
    fresh = target(torch.tensor(ids).repeat(30)[None, : ways_peagle.READ + 1]).logits[0, -1]
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])
    torch.testing.assert_close(rows[0], fresh, atol=1e-3, rtol=1e-4)


# ---- prepacked layers -----------------------------------------------------------------------------------------------


def test_each_way_meets_its_own_layers(target, tokenizer, drafter, prompts, monkeypatch):
    seen, generate = [], target.generate

    def record(*args, **options):
        seen.append(("custom_generate" in options, "forward" in vars(target.lm_head), "forward" in vars(drafter.fc)))
        return generate(*args, **options)

    monkeypatch.setattr(target, "generate", record)
    args = EvaluationArguments(ways=["stock", "plain", "chain"], **QUIET | {"max_new_tokens": 3, "prepack": True})
    evaluate(target, tokenizer, drafter, prompts[:2], args)
    # What stood in the place of generate sees drafted calls too, with our decoding loop.
    ways = [(False, False, True), (False, True, True), (True, True, True)]
    assert seen == ways + ways + ways[::-1]  # the warm-up first


def test_float32_on_a_cpu_is_prepacked_and_restored(target, drafters, report):
    machine = report["environment"]
    models = [module for model in (target, *drafters) for module in model.modules()]
    linears = [module for module in models if isinstance(module, nn.Linear)]
    assert report["settings"]["prepack"] is True and report["settings"]["dtype"] is None
    assert machine["prepacked_bytes"] == 4 * sum(linear.weight.numel() for linear in linears)
    assert not any("forward" in vars(linear) for linear in linears) and "generate" not in vars(target)


def test_it_can_be_left_out(target, tokenizer, drafter, prompts, capsys):
    args = EvaluationArguments(ways=["stock", *CHAIN], **QUIET)
    report = evaluate(target, tokenizer, drafter, prompts[:1], args)
    assert report["settings"]["prepack"] is False and report["environment"]["prepacked_bytes"] == 0
    assert report["settings"]["ways"] == list(report["ways"]) == CHAIN
    assert report["ways"]["chain"]["total"]["speed_up_over_stock"] is None
    print_table(report)
    assert "prepacked" not in capsys.readouterr().out


def test_it_is_refused_where_it_cannot_be(target, tokenizer, drafter, prompts, monkeypatch):
    low = LlamaForCausalLM(target.config).to(torch.bfloat16).eval()
    args = EvaluationArguments(**QUIET | {"prepack": True})
    with pytest.raises(ValueError, match="torch.bfloat16 on cpu"):
        evaluate(low, tokenizer, drafter, prompts[:1], args)
    monkeypatch.setattr(evaluate_peagle, "prepack", lambda model: prepack(low if model is drafter else model))
    with pytest.raises(ValueError, match="torch.bfloat16 on cpu"):
        evaluate(target, tokenizer, drafter, prompts[:1], args)
    assert "generate" not in vars(target) and "forward" not in vars(target.lm_head)


@pytest.mark.parametrize("words, value", [([], None), (["--prepack", "false"], False), (["--prepack", "true"], True)])
def test_the_flag(words, value):
    assert HfArgumentParser(EvaluationArguments).parse_args_into_dataclasses(words)[0].prepack is value


def test_another_answer_of_others_breaks_no_promise(target, tokenizer, drafter, prompts, monkeypatch, capsys):
    def corrupt(target, way, ids, *args, **options):
        run = answer(target, way, ids, *args, **options)
        if way.name in ("stock", "lookup") and ids == prompts[1]["input_ids"]:
            run["tokens"][-1] += 1
        return run

    monkeypatch.setattr(evaluate_peagle, "answer", corrupt)
    args = EvaluationArguments(ways=["stock", "lookup", *CHAIN], **QUIET | {"prepack": True, "max_new_tokens": 4})
    report = evaluate(target, tokenizer, drafter, prompts[:2], args)
    for name in ("stock", "lookup"):
        assert [row["identical"] for row in report["ways"][name]["prompts"]] == [1, 0]
    assert report["ways"]["chain"]["total"]["identical"] == 1 and not report["promise_broken"]
    print_table(report)
    out = capsys.readouterr().out
    assert out.count(" 1/2\n") == 2 and "!!!" not in out
