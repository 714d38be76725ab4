"""The report of the benchmark: ratios and intervals of known rounds, tables, charts, and the metrics on their own."""

import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import evaluate
import psutil
import pytest
import torch
from conftest import ROOT

import environment_peagle
from decoding_peagle import DecodingStats
from environment_peagle import Disturbance, disturbances
from report_peagle import plot, print_table, summarize_ways
from ways_peagle import Way


DRAFTER = SimpleNamespace(name_or_path="drafter")


def drafting(name, **options):
    return Way(name, {"assistant_model": DRAFTER, "num_assistant_tokens": 4} | options, 4)


PLAIN, STOCK, CHAIN = Way("plain"), Way("stock"), drafting("chain")
# Kept 2 of 4, none of 4, 3 of 4 before a stop at the very next token (the last draft is never judged), 1 of 1.
KNOWN = DecodingStats(drafted=[4, 4, 4, 1], nodes=[4, 4, 4, 1], accepted=[2, 0, 3, 1], emitted=[3, 1, 3, 2])


def run(seconds, stats, prefill=0.5, **fields):
    decoded = sum(stats.emitted)
    times = {"decode_seconds": seconds, "prefill_seconds": prefill, "decoded": decoded, "memory": 10**9}
    times["round_seconds"] = [seconds / len(stats.emitted) for _ in stats.emitted]
    return {"tokens": [7] * (decoded + 1), "stats": stats, "identical": True} | times | fields


def steps(count):
    return DecodingStats(
        *([count_] * count for count_ in (0, 0, 0, 1)), draft_times=[0.0] * count, verify_times=[0.01] * count
    )


def rounds(*emitted):
    """Rounds of a chain of 4 that kept all but the last token they emitted."""
    kept = [number - 1 for number in emitted]
    return DecodingStats(
        [4] * len(kept), [4] * len(kept), kept, list(emitted), [], [0.01] * len(kept), [0.02] * len(kept)
    )


def summary(*answers, ways=(PLAIN, CHAIN), categories=None):
    """`answers`: of each prompt, the runs by way; `categories`: a letter for each."""
    prompts = [{"id": f"p{i}", "category": c} for i, c in enumerate(categories or "a" * len(answers))]
    return summarize_ways(ways, [{"prompt": i, "answers": each} for i, each in enumerate(answers)], prompts)


def answers(*taus, speed=1.5):
    """Prompts whose chain gives `tau` tokens in each of 10 rounds, at `speed` times plain's pace."""
    return [
        {
            "plain": run(tau, steps(10 * tau)),
            "chain": run(tau / speed, rounds(*[tau] * 10)),
            "stock": run(2 * tau, steps(10 * tau)),
        }
        for tau in taus
    ]


# ---- ratios ---------------------------------------------------------------------------------------------------------


def test_acceptance_by_depth_of_known_rounds():
    total = summary({"plain": run(0.9, steps(9)), "chain": run(0.6, KNOWN)})["chain"]["total"]
    assert total["joint"] == [3 / 4, 2 / 4, 1 / 4, 0]
    assert total["conditional"] == [3 / 4, 2 / 2, 1 / 2, None]
    assert total["tau"] == 9 / 4 and total["speed_up"] == pytest.approx(1.5)
    assert total["end_to_end_speed_up"] == pytest.approx(1.4 / 1.1) and total["fraction_of_ideal"] == pytest.approx(
        1.5 / 2.25
    )
    both = {"plain": run(0.9, steps(9)), "chain": run(0.6, KNOWN)}
    twice = summary(both, both)["chain"]["total"]
    assert [twice[name] for name in ("joint", "conditional", "tau")] == [
        total[name] for name in ("joint", "conditional", "tau")
    ]
    assert KNOWN.emitted == [3, 1, 3, 2]  # summing leaves the runs alone


def test_rounds_that_drafted_are_told_from_the_others():
    """Of three rounds the second is plain; the host takes 0.1 s of it, and 0.05 s of each of the others."""
    times = {"draft_times": [0.1, 0.0, 0.1], "verify_times": [0.2, 0.1, 0.3]}
    stats = DecodingStats(drafted=[2, 0, 3], nodes=[2, 0, 5], accepted=[2, 0, 1], emitted=[3, 1, 2], **times)
    total = summary({"plain": run(0.9, steps(6)), "chain": run(1.0, stats, round_seconds=[0.35, 0.2, 0.45])})
    total = total["chain"]["total"]
    assert total["tau"] == 6 / 3 and total["joint"] == [2 / 2, 1 / 2, 0, 0]
    assert (total["drafting_rounds"], total["rounds"]) == (2, 3)
    wanted = {"tau": 5 / 2, "draft_ms": 100, "verify_ms": 250, "host_ms": 50, "plain_ms": 150}
    assert total["break_even"] == pytest.approx(wanted | {"needed_tau": (100 + 250 + 50) / 150})


def test_totals_are_ratios_of_sums_and_repeats_count():
    first, second = answers(1, 1)
    second["chain"] = run(1.0, rounds(3, 3))
    report = summary(first, second)["chain"]
    assert report["total"]["tau"] == 16 / 12 and [row["tau"] for row in report["prompts"]] == [1, 3]
    runs = [{"prompt": 0, "answers": each} for each in (first, second)]
    repeated = summarize_ways([PLAIN, CHAIN], runs, [{"id": "p", "category": "a"}])["chain"]
    assert repeated["prompts"][0]["tau"] == 16 / 12 and repeated["prompts"][0]["answers"] == 2
    second["chain"]["identical"] = False
    assert summarize_ways([PLAIN, CHAIN], runs, [{"id": "p", "category": "a"}])["chain"]["total"]["identical"] == 0


def test_speed_ups_are_of_equal_work():
    """The chain is twice as fast in each prompt, but answers the slow one at length and the fast one with little."""
    slow = {"plain": run(2.0, steps(2), prefill=1.0), "chain": run(10.0, rounds(*[2] * 10), prefill=1.0)}
    fast = {"plain": run(2.0, steps(20), prefill=1.0), "chain": run(0.1, rounds(2), prefill=1.0)}
    single = {"plain": run(8.0, steps(4)), "chain": run(0.0, DecodingStats())}  # one token has no pace
    ways = summary(slow, fast, single)
    total = ways["chain"]["total"]
    assert total["speed_up"] == pytest.approx((2 + 2) / (1 + 1))
    assert total["end_to_end_speed_up"] == pytest.approx((2 + 2 + 2) / (1 + 1 + 2))
    assert total["tokens_per_second"] == pytest.approx(22 / 10.1)
    assert [row["speed_up"] for row in ways["chain"]["prompts"]] == [pytest.approx(2), pytest.approx(2), None]
    assert ways["plain"]["total"]["speed_up"] == ways["plain"]["total"]["end_to_end_speed_up"] == 1
    # What came with the prefill need not be decoded.
    early = run(0.5, rounds(5), prefill=1.0, tokens=[7] * 11)  # 6 tokens, then 5
    whole = summary({"plain": run(10.0, steps(10), prefill=1.0), "lookup": early}, ways=(PLAIN, Way("lookup", {}, 4)))
    assert whole["lookup"]["total"]["end_to_end_speed_up"] == pytest.approx(11 / 1.5)


def test_plain_answers_of_one_token_leave_nothing_to_break_even_with(capsys):
    ways = summary({"plain": run(0.0, DecodingStats()), "chain": run(1.0, rounds(2, 2))})
    assert ways["chain"]["total"]["break_even"]["needed_tau"] is None
    print_table(report_of(ways))
    assert "2.00 >" not in capsys.readouterr().out


# ---- intervals and categories ---------------------------------------------------------------------------------------


def test_intervals_come_from_whole_prompts_in_pairs():
    taus = (1, 2, 2, 3, 4)
    total = summary(*answers(*taus))["chain"]["total"]
    low, high = total["intervals"]["tau"]
    assert 1.2 < low < total["tau"] == 12 / 5 < high < 3.6
    assert total["intervals"]["speed_up"] == pytest.approx([1.5, 1.5])  # every prompt is 1.5 times as fast
    assert total["speed_up_over_stock"] is total["intervals"]["speed_up_over_stock"] is None
    kept = total["intervals"]["joint"]
    assert len(kept) == 4 and all(low <= share <= high for share, (low, high) in zip(total["joint"], kept))
    assert kept[3] == [0, 0] and kept[0][0] < kept[0][1]
    over = summary(*answers(*taus), ways=(PLAIN, STOCK, CHAIN))
    assert over["chain"]["total"]["intervals"] == total["intervals"] | {
        "speed_up_over_stock": pytest.approx([3, 3]),
        "end_to_end_speed_up_over_stock": over["chain"]["total"]["intervals"]["end_to_end_speed_up_over_stock"],
    }
    # Ten times as many prompts leave a third of the width.
    narrow = summary(*answers(*taus * 10))["chain"]["total"]["intervals"]["tau"]
    assert 2 < (high - low) / (narrow[1] - narrow[0]) < 5


def test_categories_have_intervals_from_ten_prompts_on():
    given = answers(*[1, 2] * 5, speed=2) + answers(*[2] * 9, speed=0.5)
    ways = summary(*given, categories="a" * 10 + "b" * 9, ways=(PLAIN, STOCK, CHAIN))
    parts, total = ways["chain"]["categories"], ways["chain"]["total"]
    assert "intervals" in parts["a"] and "intervals" not in parts["b"]
    assert parts["a"]["speed_up"] == pytest.approx(2) and parts["b"]["speed_up"] == pytest.approx(0.5)
    means = total["geometric_mean"]
    assert means["speed_up"] == pytest.approx(1) and means["speed_up_over_stock"] == pytest.approx(2)
    assert "intervals" not in means and total["worst_category"] == {
        "name": "b",
        "speed_up": pytest.approx(0.5),
        "speed_up_over_stock": pytest.approx(1),
    }


def test_the_mean_of_categories_has_an_interval_where_they_do():
    uneven = answers(1, 1, speed=1) + answers(1, 1, speed=4)
    means = summary(*uneven * 6, categories="aaaabbbb" * 3)["chain"]["total"]["geometric_mean"]
    low, high = means["intervals"]["speed_up"]
    assert 1 < low < means["speed_up"] < high < 4
    # Categories are drawn apart: together, low would meet low, and the interval be that of one category.
    (one_low, one_high) = summary(*uneven * 3)["chain"]["total"]["intervals"]["speed_up"]
    assert high / low < 0.9 * one_high / one_low


# ---- the table and the charts ---------------------------------------------------------------------------------------


MACHINE = {"dtype": "float32", "gpu": None, "trusted": True, "disturbances": [], "process_peak_bytes": 3 * 10**9}
SETTINGS = {
    "target": "owner/target",
    "drafter": "owner/drafter",
    "temperature": 0.0,
    "max_new_tokens": 96,
    "prepack": True,
    "interrupted": False,
}


def report_of(ways, **machine):
    return {
        "settings": SETTINGS,
        "environment": MACHINE | machine,
        "overlap": None,
        "ways": ways,
        "promise_broken": False,
    }


@pytest.mark.parametrize(
    "speed, count, words",
    [
        (0.8, 10, "slower than plain"),
        (1.25, 10, "faster"),
        (1.0, 10, "no clear difference"),
        (1.25, 9, "too few prompts to tell"),
    ],
)
def test_the_verdict_is_plain(capsys, speed, count, words):
    given = answers(*[2, 3] * 5, speed=speed)[:count]
    if speed == 1.0:
        given = answers(*[2] * 5, speed=0.5) + answers(*[2] * 5, speed=2)
    print_table(report_of(summary(*given)))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("chain: ")]
    assert "of prepacked plain decoding" in line and "with reading the prompt" in line
    assert line.endswith(words)


def test_few_prompts_claim_no_certainty(capsys, tmp_path):
    two, one = (summary(*answers(2, 3)[:count]) for count in (2, 1))
    assert one["chain"]["total"]["intervals"] is None and two["chain"]["total"]["intervals"]["tau"] == [2, 3]
    for count, words in ((1, "too narrow"), (9, "too narrow"), (10, "in brackets\n")):
        print_table(report_of(summary(*answers(*[2] * count))))
        assert words in capsys.readouterr().out
    sizes = [drafting(f"chain:{k}", num_assistant_tokens=k) for k in (2, 4)]
    given = answers(2)[0] | {way.name: run(1.0, rounds(2)) for way in sizes}
    plot(report_of(summary(given, ways=(PLAIN, *sizes))), tmp_path)
    assert (tmp_path / "sizes.png").exists()


@pytest.mark.parametrize(
    "plain, stock, words", [(2, 0.8, "slower than stock"), (2, 1, "no clear difference"), (2, 4, "faster")]
)
def test_faster_is_what_is_so_over_stock_as_well(capsys, plain, stock, words):
    """By so many times plain and stock are slower than the chain; of stock's pace, prompts differ by half where it is 1."""
    given = answers(*[2] * 10, speed=plain)
    for each, factor in zip(given, [stock * 0.5, stock * 1.5] * 5 if stock == 1 else [stock] * 10):
        each["stock"] = run(factor * each["chain"]["decode_seconds"], steps(20))
    print_table(report_of(summary(*given, ways=(PLAIN, STOCK, CHAIN))))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("chain: ")]
    assert line.endswith(words)


def test_a_disturbed_run_gives_no_verdict(capsys, tmp_path):
    ways, words = summary(*answers(2, 2, 3, 4)), "other programs took 85% of the cores during the run"
    print_table(report_of(ways, trusted=False, disturbances=[words]))
    out = capsys.readouterr().out
    assert f"THE TIMES ARE NOT TO BE TRUSTED: {words}." in out and "NOT TO BE TRUSTED\n" in out and "faster" not in out


def test_memory_is_of_each_way_on_a_gpu_alone(capsys):
    given = answers(1, 2)
    given[0]["chain"]["memory"] = 2.5e9  # the larger of the two counts
    print_table(report_of(summary(*given), gpu="H200"))
    out = capsys.readouterr().out
    assert (
        re.search(r"^plain .* 1\.00$", out, re.M) and re.search(r"^chain .* 2\.50$", out, re.M) and "held" not in out
    )
    given = [{name: each | {"memory": math.nan} for name, each in ways.items()} for ways in given]
    ways = summary(*given)
    assert ways["chain"]["total"]["peak_memory_bytes"] is None
    print_table(report_of(ways))
    out = capsys.readouterr().out
    assert "The process held 3.00 GB at most." in out and " GB\n" not in out


def test_the_table_fits_a_terminal(capsys):
    wide = [drafting(f"tree:{n}+lookup:10", draft_tree=n) for n in range(10, 22)]
    given = [each | {way.name: run(100.0, rounds(4, 4)) for way in wide} for each in answers(1, 3, 5, 4)]
    ways = summary(*given, ways=(PLAIN, STOCK, *wide), categories=["a" * 30] * 3 + ["b"])
    reasons = ["other programs took 85% of the cores during the run"] * 3
    ids = [f"a-prompt-{i}" for i in range(99)]
    found = {"conversations": 3, "first_turn": [], "run_of_words": ids, "prompts": ids, "count": 99}
    print_table(report_of(ways, gpu="H200", trusted=False, disturbances=reasons) | {"overlap": found})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    for text in ("kept at depth", "geometric mean", "worst", "tree:21+lookup:10 K=4 N=21", "99 of 4 prompts overlap"):
        assert any(text in line for line in lines), text


def test_charts(tmp_path):
    sizes = [drafting(f"chain:{k}", num_assistant_tokens=k) for k in (2, 4)]
    given = [each | {way.name: each["chain"] for way in sizes} for each in answers(1, 2, 3)]
    swept, single = summary(*given, ways=(PLAIN, *sizes)), summary(*given)
    for ways, names in (
        (swept, ["acceptance.png", "categories.png", "sizes.png"]),
        (single, ["acceptance.png", "categories.png"]),
    ):
        folder = tmp_path / str(len(names))
        folder.mkdir()
        plot(report_of(ways), folder)
        assert sorted(file.name for file in folder.iterdir()) == names
        assert all(file.read_bytes().startswith(b"\x89PNG") for file in folder.iterdir())
    before = (folder / "categories.png").read_bytes()
    plot(report_of(single, trusted=False), folder)  # says so
    assert (folder / "categories.png").read_bytes() != before
    plot(report_of(summary(*given, ways=(PLAIN,))), tmp_path)
    assert not list(tmp_path.glob("*.png"))  # nothing is drafted


# ---- whether the machine was disturbed ------------------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch):
    """A machine of 4 cores of which this process has one for 10 seconds, by the clocks that are asked."""
    clock = {"perf_counter": 0.0, "process_time": 30.0}
    for name in clock:
        monkeypatch.setattr(environment_peagle.time, name, lambda name=name: clock[name])
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    load, share = [2.4], [0.0, 27.0]
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load[0], 9.0, 9.0))
    monkeypatch.setattr(psutil, "cpu_percent", lambda: share.pop(0))

    def measure(steps, load_average=2.4, busy=27.0):
        clock.update(perf_counter=0.0, process_time=30.0)
        load[:], share[:] = [load_average], [0.0, busy]
        disturbance = Disturbance()
        clock.update(perf_counter=10.0, process_time=40.0)
        return disturbances([disturbance.lap()], steps)

    return measure


def test_a_quiet_machine_is_trusted(quiet):
    seen = quiet([0.1, 0.101, 0.1, 0.099, 0.1])
    assert seen["trusted"] and seen["disturbances"] == []
    assert seen["load_of_others"] == pytest.approx(1.9)  # 2.4 less the half that is our own
    assert seen["others_share"] == pytest.approx(0.02) and seen["step_ms"] == pytest.approx(100)


@pytest.mark.parametrize(
    "disturbed, words",
    [
        ({"load_average": 2.6}, "other programs asked for 2.1 of 4 cores before the run"),
        ({"busy": 37.0}, "other programs took 12% of the cores during the run"),
        ({"steps": [0.1, 0.2, 0.13, 0.16, 0.1]}, "the middle half of the repeated plain steps differed by 46%"),
        (
            {"steps": [0.1] * 4 + [0.11] * 6 + [0.12] * 4},
            "the last third of the repeated plain steps took 1.20 times as long as the first",
        ),
        (
            {"steps": [0.12] * 4 + [0.11] * 6 + [0.1] * 4},
            "the last third of the repeated plain steps took 0.83 times as long as the first",
        ),
    ],
)
def test_a_disturbed_one_is_not(quiet, disturbed, words):
    seen = quiet(**{"steps": [0.1] * 5} | disturbed)
    assert not seen["trusted"] and seen["disturbances"] == [words]


def test_another_program_is_seen():
    """The real clocks, beside a process that does nothing but count."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        disturbance = Disturbance()
        sum(range(20_000_000))
        share = disturbance.lap()["others_share"]
    finally:
        other.kill()
        other.wait()
    assert 0.2 / psutil.cpu_count() < share <= 1


# ---- the metrics on their own ---------------------------------------------------------------------------------------


USE = """
import evaluate, json, sys
tau = evaluate.load(f"{sys.argv[1]}/acceptance_length").compute(emitted=[[3, 1, 2], [], [1, 1, 1, 1]])
times = {"tokens": [60, 40], "seconds": [3.0, 2.0], "baseline_tokens": [60, 40], "baseline_seconds": [6.0, 6.0]}
print(json.dumps([tau, evaluate.load(f"{sys.argv[1]}/speed_up").compute(**times)]))
"""


def test_metrics_load_offline_and_stand_alone(tmp_path):
    """In a process that sees nothing else of this repository."""
    environ = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", USE, str(ROOT / "metrics")]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tau, speed = json.loads(done.stdout)
    assert tau == {"acceptance_length": 10 / 7, "tokens": 10, "rounds": 7}
    assert speed == {"speed_up": 2.4, "tokens_per_second": 20, "baseline_tokens_per_second": pytest.approx(100 / 12)}


def test_metrics_agree_with_the_report_and_refuse_nonsense(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = answers(1, 2, 3, 4)
    total = summary(*given)["chain"]["total"]
    tau, speed = (evaluate.load(f"metrics/{name}", cache_dir=tmp_path) for name in ("acceptance_length", "speed_up"))
    stats = [each["chain"]["stats"] for each in given]
    assert tau.compute(emitted=[each.emitted for each in stats])["acceptance_length"] == total["tau"]
    columns = {"tokens": "decoded", "seconds": "decode_seconds"}
    own = {name: [each["chain"][key] for each in given] for name, key in columns.items()}
    own |= {f"baseline_{name}": [each["plain"][key] for each in given] for name, key in columns.items()}
    assert speed.compute(**own)["speed_up"] == total["speed_up"]
    for emitted in ([[]], [[2, 0]]):
        with pytest.raises(ValueError, match="at least one round"):
            tau.compute(emitted=emitted)
    for name, values in own.items():
        for wrong in [math.nan, -1] if "seconds" in name else [-1]:
            with pytest.raises(ValueError, match="at least 0"):
                speed.compute(**own | {name: [*values[:3], wrong]})
        with pytest.raises(ValueError, match="above 0 in all"):
            speed.compute(**own | {name: [0] * 4})
    # An answer of one token, which came with the prefill, has nothing to count.
    assert speed.compute(**{name: [*values, 0] for name, values in own.items()})["speed_up"] == total["speed_up"]
