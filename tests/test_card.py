"""README has the numbers of the files in `results/`, and nothing else between its markers."""

import json
import re
import shutil
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from conftest import ROOT
from huggingface_hub import ModelCard
from test_report import rounds, run, steps

from card_peagle import BLOCK, BLOCKS, main, write_card
from configuration_peagle import PEagleConfig
from data.prompts import overlap
from environment_peagle import environment
from evaluate_peagle import EvaluationArguments
from report_peagle import summarize_ways
from ways_peagle import Way


sys.path.insert(0, str(ROOT / "benchmarks"))

from tables import measure_tables  # noqa: E402


README = (ROOT / "README.md").read_text()
WRITTEN = [match[1] for match in BLOCK.findall(README)]


@pytest.fixture
def copied(tmp_path):
    """README and results/ in a folder of their own."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "results", tmp_path / "results")
    return tmp_path


def changed_digit(text: str, start: int) -> str:
    """The text with another digit in place of the first behind `start`."""
    at = next(i for i in range(start, len(text)) if text[i].isdigit())
    return text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]


def rows(block: str) -> list[list[str]]:
    """The cells of all tables in a block, without their heads."""
    lines = [line[2:-2].split(" | ") for line in block.splitlines() if line.startswith("| ")]
    return [
        line for i, line in enumerate(lines) if line[-1] != "---" and lines[i + 1 : i + 2] != [["---"] * len(line)]
    ]


def alone(name: str, folder) -> str:
    """What a card says that has this one block."""
    card = f"---\nbase_model: org/target\n---\n\n<!-- begin {name} --><!-- end {name} -->\n"
    return BLOCK.search(write_card(card, folder)).group(3)


# ---- README ---------------------------------------------------------------------------------------------------------


def test_readme_has_the_numbers_of_the_results(capsys):
    assert {"spec_bench", "spec_bench_categories", "prompts", "recipes", "learning_curve"} <= {*WRITTEN}
    assert main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", WRITTEN)
def test_a_changed_digit_is_found_and_mended(name, copied, capsys):
    readme = copied / "README.md"
    wrong = changed_digit(README, README.index("| --- |", README.index(f"<!-- begin {name} -->")))
    readme.write_text(wrong)
    assert main(["--check"], copied) == 1
    assert readme.read_text() == wrong  # --check writes nothing
    told = [line for line in capsys.readouterr().out.splitlines() if line[0] in "+-"]
    assert len(told) == 4 and "README.md" in told[0]  # two lines of names, the wrong one and the right one
    assert main([], copied) == 0
    assert readme.read_text() == README


@pytest.mark.parametrize("file", ["spec_bench.json", "prompts.json", "recipes.jsonl"])
def test_a_changed_result_is_found(file, copied):
    path = copied / "results" / file
    text = path.read_text()
    if file.endswith("jsonl"):
        changed = changed_digit(text, text.rindex('"eval_tau": '))
    else:
        report = json.loads(text)
        report["ways"]["chain"]["total"]["tau"] += 0.01
        changed = json.dumps(report)
    path.write_text(changed)
    assert main(["--check"], copied) == 1


def test_a_changed_model_index_is_found(copied):
    (copied / "README.md").write_text(changed_digit(README, README.index("      value: ")))
    assert main(["--check"], copied) == 1


def test_what_stands_around_the_blocks_is_left_alone(copied):
    changed = README.replace("# P-EAGLE\n", "# P-EAGLE 17 *`\\ \n\n<!-- a note -->\n")
    card = write_card(changed, copied / "results")
    assert BLOCK.split(card)[0::5] == BLOCK.split(changed)[0::5]
    assert ModelCard(card).data.tags == ModelCard(README).data.tags


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("<!-- begin training_step --><!-- end training_step -->", "there is no .*training.json"),
        ("<!-- begin speeds --><!-- end speeds -->", "speeds"),
        ("<!-- begin recipes -->", "do not pair"),
        ("<!-- end recipes -->", "do not pair"),
        ("<!-- begin recipes --><!-- begin prompts --><!-- end recipes --><!-- end prompts -->", "do not pair"),
    ],
)
def test_blocks_that_cannot_be_written_are_refused(broken, told, copied):
    with pytest.raises((FileNotFoundError, ValueError), match=told):
        write_card(f"{README}\n{broken}\n", copied / "results")


def test_the_model_index_has_the_totals_of_the_reports():
    card = ModelCard.load(ROOT / "README.md")
    for stem in ("spec_bench", "prompts"):
        report = json.loads((ROOT / f"results/{stem}.json").read_text())
        found = {(r.metric_type, r.metric_value) for r in card.data.eval_results if r.dataset_type == stem}
        chain, trusted = report["ways"]["chain"]["total"], report["environment"]["trusted"]
        assert ("tau", round(chain["tau"], 3)) in found
        assert (("speed_up", round(chain["speed_up"], 3)) in found) == trusted == ("speed_up" in dict(found))


# ---- a report of several ways ---------------------------------------------------------------------------------------

MACHINE = {"cpu": "Some CPU", "gpu": None, "threads": 2, "dtype": "float32", "load_warning": None}
MACHINE |= {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0"}
DRAFTER = SimpleNamespace(name_or_path="drafter", config=PEagleConfig.from_pretrained(ROOT))
ONE_BY_ONE = SimpleNamespace(name_or_path="other", config=PEagleConfig.from_pretrained(ROOT, parallel_drafting=False))
NAMES = ["stock", "plain", "lookup:5", "chain:2+lookup:10", "chain:4", "tree:15", "tree:31", "auto", "sequential:3"]
SETTINGS = {"command": "python evaluate_peagle.py --made up", "prepack": True}


def report(taus=((1, 2), (2, 3), (2, 5), (4, 4)), categories=("chat", "maths", "maths", "maths"), names=NAMES, **made):
    """What evaluate_peagle.py makes of known rounds, of which `taus` has the tokens, one tuple for each prompt. Plain
    decoding gives 11 tokens a second, and every way one more than that before it in `NAMES`."""
    args = EvaluationArguments(ways=names, sequential_drafter="other" if "sequential:3" in names else None, **made)
    ways = [Way.named(name, DRAFTER, ONE_BY_ONE) for name in names]
    prompts = [{"id": f"p{n}", "category": category} for n, category in enumerate(categories)]
    runs = []
    for n, emitted in enumerate(taus):
        answers = {}
        for way in ways:
            pace, stats = 10 + NAMES.index(way.name), rounds(*emitted) if way.depth else steps(sum(emitted))
            answers[way.name] = run(sum(emitted) / pace, stats, identical=n != 2)
        runs.append({"prompt": n, "answers": answers})
    settings = asdict(args) | SETTINGS
    whole = {"settings": settings, "environment": MACHINE, "overlap": {"count": 3, "conversations": 1475}}
    return json.loads(json.dumps(whole | {"ways": summarize_ways(ways, runs, prompts), "promise_broken": False}))


def write(folder, made=None, **changes):
    (folder / "spec_bench.json").write_text(json.dumps((made or report()) | changes))
    return folder


def test_every_way_stands_beside_the_others(tmp_path):
    block = alone("spec_bench", write(tmp_path))
    ways = rows(block)
    assert [row[0] for row in ways[:9]] == [
        "stock plain",
        "prepacked plain",
        "prompt lookup of 5",
        "chain, K = 2, with prompt lookup of 10",
        "chain, K = 4",
        "tree, N = 15",
        "tree, N = 31",
        "`auto`, the default",
        "sequential drafter, K = 3",
    ]
    # 23 tokens of decoding, and in each of 4 answers a first one after half a second.
    assert ways[1] == ["prepacked plain", "1.00 (1.00 to 1.00)", "11.0", "6.60", *ways[1][4:]]
    assert ways[1][4:] == ["1.00x (1.00 to 1.00)", "1.10x (1.10 to 1.10)", "3 of 4"]
    low, high = report()["ways"]["tree:15"]["total"]["intervals"]["tau"]
    assert 1.5 <= low < 23 / 8 < high <= 4
    assert ways[5] == [
        "tree, N = 15",
        f"2.88 ({low:.2f} to {high:.2f})",
        "15.0",
        "7.64",
        "1.36x (1.36 to 1.36)",
        "1.50x (1.50 to 1.50)",
        "3 of 4",
    ]
    # What rounds take is told of drafters; of the 8 first drafts 7 were kept, of the second 4, then 3 and 1.
    assert [row[0] for row in ways[9:]] == [row[0] for row in ways[4:9]]
    kept = "88% / 50% / 38% / 12%"
    pays = report()["ways"]["tree:15"]["total"]["break_even"]["needed_tau"]
    assert ways[10] == ["tree, N = 15", kept, "191.7", "20.0", "10.0", "161.7", f"{pays:.2f}"]
    assert "4 prompts, up to 128 new tokens each, greedy; 3 of them overlap the 1,475 training conversations" in block
    assert block.rstrip().endswith(
        "```bash\npython evaluate_peagle.py --made up\n```\n\n"
        "Some CPU, 2 threads, float32, python 3.11.7, torch 2.13.0, transformers 5.24.0."
    )


def test_categories_stand_above_their_mean(tmp_path):
    block = alone("spec_bench_categories", write(tmp_path))
    first, second, mean = rows(block)
    assert first[:2] == ["chat", "1"] and second[:2] == ["maths", "3"] and mean[1] == "4"
    heads = [f"tau, {way}" for way in ("chain, K = 4", "tree, N = 15", "tree, N = 31", "`auto`, the default")]
    gains = ["`auto` over prepacked plain", "`auto` over stock plain"]
    assert f"| {' | '.join(['category', 'prompts', *heads, *gains])} |" in block
    # 3 tokens of 2 rounds, 20 of 6, and 23 of 8; so few prompts of a category have no intervals.
    assert first[2:] == ["1.50"] * 4 + ["1.55x", "1.70x"]
    assert second[2:] == ["3.33"] * 4 + ["1.55x", "1.70x"]
    assert [cell.split(" (")[0] for cell in mean[2:]] == ["2.88"] * 4 + ["1.55x", "1.70x"]
    assert "least in chat: 1.55x" in block


@pytest.mark.parametrize(
    "reason", [{"load_warning": "WARNING: busy, do not."}, {"trusted": False, "disturbances": ["busy, do not"]}]
)
def test_times_of_a_disturbed_machine_are_called_so(reason, tmp_path):
    """And do not stand in the model-index."""

    def speeds(folder):
        card = write_card("---\nbase_model: org/target\n---\n", folder)
        return [result.metric_type for result in ModelCard(card).data.eval_results]

    assert "not to be trusted" not in alone("spec_bench", write(tmp_path))
    assert speeds(tmp_path) == ["tau", "speed_up"] * 4
    write(tmp_path, environment=MACHINE | reason)
    for name in ("spec_bench", "spec_bench_categories"):
        assert "busy, do not**." in alone(name, tmp_path) and "The times are not to be trusted" in alone(
            name, tmp_path
        )
    assert speeds(tmp_path) == ["tau"] * 4


def test_answers_of_one_token_have_no_speed(tmp_path):
    """Nothing was decoded after it, so neither tau nor pace is known, here of the one chat."""
    write(tmp_path, report(taus=((), (2, 3), (2, 5), (4, 4))))
    first, second, mean = rows(alone("spec_bench_categories", tmp_path))
    assert first == ["chat", "1", *["–"] * 6] and second[-2].startswith("1.55x") and mean[2].startswith("3.33 ")
    block = alone("spec_bench_categories", tmp_path)
    for other in ("prepacked", "stock"):
        assert f"Not in the geometric mean over {other} plain, as no speed-up is known: chat." in block
    assert "least in maths: 1.55x" in block
    write(tmp_path, report(taus=((), ()), categories=("chat", "maths")))
    for name in ("spec_bench", "spec_bench_categories"):
        assert "None" not in alone(name, tmp_path) and "least in" not in alone(name, tmp_path)
    assert rows(alone("spec_bench", tmp_path))[1][:2] == ["prepacked plain", "–"]
    assert not ModelCard(write_card("---\nbase_model: org/target\n---\n", tmp_path)).data.eval_results


def test_no_interval_is_shown_of_one_prompt_or_where_the_report_has_none(tmp_path):
    write(tmp_path, one := report(taus=((2, 3),), categories=("chat",)))
    assert one["ways"]["auto"]["total"]["intervals"] is None  # always drawing the one would look like certainty
    for name in ("spec_bench", "spec_bench_categories"):
        block = alone(name, tmp_path)
        assert "1 prompt, up to" in block and "2.50" in block and "(2.50" not in block
        assert "interval" not in block and "x (" not in block
    made = report()
    made["ways"]["auto"]["total"]["intervals"] |= {"tau": None, "speed_up": [None, None]}
    auto = rows(alone("spec_bench", write(tmp_path, made)))[7]
    assert auto[:2] == ["`auto`, the default", "2.88"] and auto[4] == "1.55x" and " to " in auto[5]


def test_categories_without_auto_are_refused_in_words(tmp_path):
    write(tmp_path, report(names=["plain", "chain:4"]))
    assert rows(alone("spec_bench", tmp_path))[1][0] == "chain, K = 4"
    with pytest.raises(ValueError, match="No way `auto`.*--made up.*measure again with `auto`"):
        alone("spec_bench_categories", tmp_path)


def test_a_report_of_other_answers_makes_no_card(tmp_path):
    with pytest.raises(ValueError, match="spec_bench.json.*a bug"):
        alone("spec_bench", write(tmp_path, promise_broken=True))


def test_a_report_of_an_interrupted_run_makes_no_card(tmp_path):
    made = report()
    for interrupted in (False, True):
        made["settings"]["interrupted"] = interrupted
        write(tmp_path, made)
        if interrupted:
            for name in ("spec_bench", "spec_bench_categories"):
                with pytest.raises(ValueError, match="spec_bench.json is of an interrupted run.*make it again"):
                    alone(name, tmp_path)
            with pytest.raises(ValueError, match="interrupted"):  # nor does it enter the model-index
                write_card("---\nbase_model: org/target\n---\n", tmp_path)
        else:
            assert "4 prompts" in alone("spec_bench", tmp_path)


def test_the_model_index_says_of_the_prompts_what_the_report_does(tmp_path):
    def names(**made):
        card = write_card("---\nbase_model: org/target\n---\n", write(tmp_path, report(**made)))
        return {result.dataset_name for result in ModelCard(card).data.eval_results}

    assert names(prompts="data/odd.jsonl") == {"odd.jsonl, 4 prompts"}
    assert names(prompts="even.jsonl", per_category=3) == {"even.jsonl, 4 prompts, at most 3 of each category"}
    assert names(held_out_file="chats.jsonl") == {"held-out chats of the target's own"}


def test_the_blocks_say_how_many_prompts_training_has_seen(tmp_path):
    chats = tmp_path / "chats.jsonl"
    said = [[{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}] for text in "abc"]
    chats.write_text("\n".join(json.dumps({"messages": chat}) for chat in said))
    asked = [{"id": text, "messages": [{"role": "user", "content": text}]} for text in "abxy"]
    for prompts, count in ((asked, 2), (asked[2:], 0)):
        write(tmp_path, overlap=overlap(prompts, [str(chats)], 0.0))
        for name in ("spec_bench", "spec_bench_categories"):
            assert f"greedy; {count} of them overlap the 3 training conversations" in alone(name, tmp_path)
    assert "overlap" not in alone("spec_bench", write(tmp_path, overlap=None))  # nobody looked


# ---- what training and the benchmarks write -------------------------------------------------------------------------


def test_recipes_are_named_by_their_options(tmp_path):
    lines = [
        {"recipe": "kl", "options": [], "command": "one", "eval_tau": 1.25, "eval_accuracy_depth_0": 0.5},
        {
            "recipe": "ce",
            "options": ["--loss", "ce"],
            "command": "one",
            "eval_tau": 1.5,
            "eval_accuracy_depth_0": 0.25,
        },
    ]
    (tmp_path / "recipes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    block = alone("recipes", tmp_path)
    assert rows(block) == [["the defaults", "1.25", "50.0%"], ["`--loss ce`", "**1.50**", "25.0%"]]
    assert "```bash\none\n```\n\nThe machine was not recorded." in block
    lines[1] |= {"environment": MACHINE}
    (tmp_path / "recipes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "Some CPU, 2 threads" in alone("recipes", tmp_path)


def test_what_more_tokens_would_bring_is_called_an_extrapolation(tmp_path):
    points = [(1000 * 2**i, 3 - 2 * (2.0**i) ** -0.25) for i in range(6)]
    lines = ["step,num_input_tokens_seen,eval_tau", *(f"1,{tokens},{tau}" for tokens, tau in points)]
    (tmp_path / "learning_curve.csv").write_text("\n".join(lines))
    with pytest.raises(FileNotFoundError, match="learning_curve.json"):
        alone("learning_curve", tmp_path)
    (tmp_path / "learning_curve.json").write_text(json.dumps({"settings": SETTINGS, "environment": MACHINE}))
    block = alone("learning_curve", tmp_path)
    assert rows(block) == [[f"{tokens:,}", f"{tau:.2f}"] for tokens, tau in points]
    told = re.search(
        r"Extrapolated, not measured: ten times the tokens, 320,000, would bring tau (\S+) \((\S+) to (\S+)\)", block
    )
    assert [float(number) for number in told.groups()] == pytest.approx([3 - 2 * 320**-0.25] * 3, abs=0.05)


def test_a_benchmark_writes_what_the_card_shows(tmp_path, llama, capsys):
    def shape():
        yield {"K_train": 5, "slots": 9174, "step, s": 9.04, "peak memory, GiB": 0.854, "note": None}
        yield {"K_train": 1, "slots": 4095, "step, s": 28.84, "peak memory, GiB": 0.78, "note": None}

    measure_tables({"shape": shape}, environment(llama), str(tmp_path / "training.json"))
    assert "9,174" in capsys.readouterr().out
    block = alone("training_shape", tmp_path)
    assert rows(block) == [["5", "9,174", "9.04", "0.85"], ["1", "4,095", "28.8", "0.78"]]  # no column of nothing
    assert "```bash\npython " in block and "float32" in block
    with pytest.raises(ValueError, match="no table length"):
        alone("training_length", tmp_path)


def test_every_benchmark_table_has_a_block():
    import training

    assert {name.removeprefix("training_") for name in BLOCKS if name.startswith("training_")} == {*training.TABLES}
