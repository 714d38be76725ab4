"""What `evaluate_peagle.py` saw, summed up: ratios with their intervals, tables and charts.

All ratios are of sums over prompts, and a 95% interval is what such a ratio takes when whole prompts are drawn with
replacement, for rounds within an answer are not independent.
"""

import math
import textwrap
import warnings
from itertools import product
from pathlib import Path

import numpy as np

from data.prompts import RUN
from decoding_peagle import DecodingStats
from metrics.acceptance_length.acceptance_length import acceptance_length
from metrics.speed_up.speed_up import speed_up, tokens_per_second


FEW = 10  # prompts below which intervals are too narrow: a category has none, and the whole no verdict
NARROW = ", too narrow with so few prompts"
SAMPLES = 2000
BASELINES = {"": "plain", "_over_stock": "stock"}  # what a speed-up is over, by the end of its name
SPEED_UPS = [f"speed_up{suffix}" for suffix in BASELINES]
# The options of `generate` that size drafts, by their names in a table.
SIZES = {"num_assistant_tokens": "K", "draft_tree": "N", "prompt_lookup_num_tokens": "lookup"}
DEEPEST, BESIDE = 8, 7  # depths, and ways beside one another, that a line of a table has room for
PARTING = {  # by whether it is a near tie
    True: "{name}: they part at new token {position} (from 0), a near tie: the target's scores of the two are {gap:.3g} apart",
    False: "{name}: they part at new token {position} (from 0), NO near tie: the target's scores of the two are {gap} apart",
}


# ---- sums and ratios ------------------------------------------------------------------------------------------------


def counts_of(runs: list[dict], depth: int) -> dict:
    """Sums over the answers to one prompt in one way; lists are by depth. `drafting_` is of the rounds that drafted alone."""
    stats = sum((run["stats"] for run in runs), DecodingStats())
    kept = [stats.depth_counts(d) for d in range(depth)]
    seconds = [each for run in runs for each in run["round_seconds"]]
    times = zip(stats.nodes, stats.emitted, stats.draft_times, stats.verify_times, seconds)
    drafting = [row for row in times if row[0] or row[2]]
    prefill, decode = (sum(run[f"{part}_seconds"] for run in runs) for part in ("prefill", "decode"))
    return {
        "answers": len(runs),
        "tokens": sum(len(run["tokens"]) for run in runs),
        "decoded": sum(run["decoded"] for run in runs),
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "total_seconds": prefill + decode,
        "rounds": len(stats.emitted),
        "emitted": sum(stats.emitted),
        "draft_seconds": stats.draft_seconds,
        "verify_seconds": stats.verify_seconds,
        "kept": [count for count, _ in kept],
        "tried": [count for _, count in kept],
        "judged": [stats.judged(d) for d in range(depth)],
        "drafting_rounds": len(drafting),
        "drafting_emitted": sum(row[1] for row in drafting),
        "drafting_draft_seconds": sum(row[2] for row in drafting),
        "drafting_verify_seconds": sum(row[3] for row in drafting),
        "drafting_host_seconds": sum(row[4] - row[2] - row[3] for row in drafting),
        "identical": math.nan if None in (same := [run["identical"] for run in runs]) else float(all(same)),
        "memory": max(run["memory"] for run in runs),
    }


def columns_of(rows: list[dict]) -> dict[str, np.ndarray]:
    """The [`counts_of`] prompts, each name an array `(prompts,)` or `(depth, prompts)`."""
    return {name: np.array([row[name] for row in rows]).T for name in rows[0]}


def taken(columns: dict | None, prompts: np.ndarray) -> dict | None:
    """The columns of some prompts `(...,)`, which become the last axes."""
    return columns and {name: column[..., prompts] for name, column in columns.items()}


def ratios(own: dict, baselines: dict[str, dict | None]) -> dict:
    """What an interval belongs to, from columns `(..., prompts)` of one way and, by suffix, of what it is compared with.

    `joint[d]` is the share of the rounds with drafts that kept one at depth d; `conditional[d]` is the share of the draft
    tokens there that were kept among those judged: all before them were kept and no stop came first. Speed-ups are of equal work, see [`seconds_of_plain`], so where
    answers have other lengths they are not the ratio of the tokens per second.
    """
    found = {"tau": acceptance_length(own["emitted"], own["rounds"])}
    kept, tried, judged = (own[name].sum(axis=-1) for name in ("kept", "tried", "judged"))
    found |= {"joint": kept / tried, "conditional": kept / judged}
    for prefix, *pace in (("", "decoded", "decode_seconds"), ("end_to_end_", "tokens", "total_seconds")):
        found[f"{prefix}tokens_per_second"] = tokens_per_second(*(own[name] for name in pace))
        tokens = baselines[""][pace[0]]
        for suffix, other in baselines.items():
            both = [seconds_of_plain(each, baselines[""], bool(prefix)) for each in (own, other) if other]
            # A prompt that one of them gives no pace for says nothing of the two.
            work = [np.where(np.isfinite(sum(both)), each, 0) for each in (tokens, *both)] if other else []
            found[f"{prefix}speed_up{suffix}"] = speed_up(*work[:2], *work[::2]) if other else None
    return found


def seconds_of_plain(own: dict, plain: dict, whole: bool) -> np.ndarray:
    """What a way would have taken for as many tokens as plain's answers have, at its own pace in each prompt: `(..., prompts)`.

    Without the first tokens, or with its own prefill where the `whole` counts. NaN where its answer has no more than these, and
    thus no pace, but plain's has.
    """
    left = np.maximum(plain["tokens"] - (own["tokens"] - own["decoded"]), 0) if whole else plain["decoded"]
    decoding = np.where(left == 0, 0.0, own["decode_seconds"] * (left / own["decoded"]))
    return decoding + own["prefill_seconds"] if whole else decoding


def plain_numbers(value):
    """Arrays as lists, and None for what has no value, as a ratio without a denominator."""
    if isinstance(value, dict):
        return {name: plain_numbers(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(item) for item in value]
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return plain_numbers(value) if isinstance(value, list) else None if value != value else value


def interval(draws: np.ndarray | None):
    """`[low, high]` of draws `(samples,)`, one for each depth of `(depth, samples)`."""
    return None if draws is None else np.nanquantile(draws, [0.025, 0.975], axis=-1).T


def summarize(own: dict, baselines: dict[str, dict | None]) -> dict:
    """The [`ratios`] of the prompts in these columns, and what makes them up. A ratio without a denominator is None.

    `_ms` are milliseconds per round, but `prefill_ms` per answer; `host_ms` is what is neither model's forward.
    `identical` is the share of the prompts whose answers were plain's, `fraction_of_ideal` the speed-up over tau, which it
    would be if a round took no longer than a plain token. `break_even` has the inequality that decides whether drafts pay,
    in the rounds that drafted: `tau > needed_tau = (verify_ms + draft_ms + host_ms) / plain_ms`.
    """
    total = {name: column.sum(axis=-1) for name, column in own.items()}
    found = ratios(own, baselines)
    spent = {part: total[f"{part}_seconds"] for part in ("draft", "verify")}
    spent["host"] = total["decode_seconds"] - sum(spent.values())
    found |= {f"{part}_ms": 1000 * seconds / total["rounds"] for part, seconds in spent.items()}
    found["round_ms"] = 1000 * total["decode_seconds"] / total["rounds"]
    found["prefill_ms"] = 1000 * total["prefill_seconds"] / total["answers"]
    found |= {"identical": own["identical"].mean(), "peak_memory_bytes": own["memory"].max(), "break_even": None}
    found["fraction_of_ideal"] = found["speed_up"] / found["tau"]
    found |= {name: total[name] for name in ("answers", "tokens", "decoded", "rounds", "drafting_rounds")}
    if rounds := total["drafting_rounds"]:
        plain = 1000 / tokens_per_second(baselines[""]["decoded"], baselines[""]["decode_seconds"])
        parts = {
            f"{part}_ms": 1000 * total[f"drafting_{part}_seconds"] / rounds for part in ("verify", "draft", "host")
        }
        needed = {"needed_tau": sum(parts.values()) / plain, "plain_ms": plain}
        found["break_even"] = {"tau": total["drafting_emitted"] / rounds} | parts | needed
    return found


def summarize_ways(ways: list, runs: list[dict], prompts: list[dict]) -> dict:
    """By name of each [`Way`]: the `drafter`, `depth` and `options` of its drafts, and a [`summarize`] of `total`, of each of the
    `categories` and of each of the `prompts`, these with their `id`, `category` and `partings`.

    `total`, and categories of 10 prompts and more, have the `intervals` of the [`ratios`], `total` None below 2; it has also the
    `geometric_mean` of the categories' speed-ups and the `worst_category`.
    """
    answers = [[run["answers"] for run in runs if run["prompt"] == i] for i in range(len(prompts))]

    def rows(way):
        return [counts_of([answer[way.name] for answer in each], way.depth) for each in answers]

    columns = {way.name: columns_of(rows(way)) for way in ways}
    names = np.array([prompt["category"] for prompt in prompts])
    members = {name: np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())}

    def numbers(name: str, chosen: np.ndarray, count=summarize):
        others = {suffix: taken(columns.get(other), chosen) for suffix, other in BASELINES.items()}
        return count(taken(columns[name], chosen), others)

    def drawn(name: str, chosen: np.ndarray) -> dict:
        # Seeded by the prompts: the same draws for every way, others for every category.
        picks = np.random.default_rng(chosen).integers(len(chosen), size=(SAMPLES, len(chosen)))
        return numbers(name, chosen[picks], ratios)

    def intervals(draws: dict) -> dict:
        return {name: interval(values) for name, values in draws.items()}

    report = {}
    # Ratios without a denominator are no fault, and become None.
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All-NaN")
        for way in ways:
            total, categories, draws = numbers(way.name, np.arange(len(prompts))), {}, []
            several = len(prompts) > 1  # a single one is always drawn, which would look like certainty
            total["intervals"] = intervals(drawn(way.name, np.arange(len(prompts)))) if several else None
            for category, chosen in members.items():
                categories[category] = numbers(way.name, chosen)
                draws.append(drawn(way.name, chosen))
                if len(chosen) >= FEW:
                    categories[category]["intervals"] = intervals(draws[-1])
            total |= over_categories(categories, draws)
            singles = [numbers(way.name, np.array([i])) for i in range(len(prompts))]
            partings = [[a[way.name]["parting"] for a in each if "parting" in a[way.name]] for each in answers]
            singles = [
                {"id": prompt["id"], "category": prompt["category"]} | single | {"partings": found}
                for prompt, single, found in zip(prompts, singles, partings)
            ]
            drafts = {"drafter": None if way.drafter is None else way.drafter.name_or_path, "depth": way.depth}
            drafts["options"] = {
                name: value for name, value in way.options.items() if name in SIZES and value is not None
            }
            report[way.name] = plain_numbers(drafts | {"total": total, "categories": categories, "prompts": singles})
    return report


def over_categories(categories: dict[str, dict], draws: list[dict]) -> dict:
    """The `geometric_mean` of their speed-ups, with intervals where each has some, and the `worst_category` over plain."""
    names = [name for name in SPEED_UPS if draws[0][name] is not None]

    def mean(rows) -> dict:
        return {name: np.exp(np.mean(np.log([row[name] for row in rows]), axis=0)) for name in names}

    means = dict.fromkeys(SPEED_UPS) | mean(categories.values())
    if all("intervals" in row for row in categories.values()):
        means["intervals"] = {name: interval(values) for name, values in mean(draws).items()}
    worst = min(categories, key=lambda name: np.nan_to_num(categories[name]["speed_up"], nan=math.inf))
    gains = {name: categories[worst][name] for name in SPEED_UPS}
    return {"geometric_mean": means, "worst_category": {"name": worst} | gains}


# ---- the table ------------------------------------------------------------------------------------------------------


def number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else f"{value:{form}}"


def ranged(row: dict, name: str, unit: str = "x") -> str:
    """A ratio with its interval, as `1.22x (1.14 to 1.30)`."""
    low, high = (row.get("intervals") or {}).get(name) or (None, None)
    text = "-" if row[name] is None else f"{row[name]:.2f}{unit}"
    return text if low == high else f"{text} ({low:.2f} to {high:.2f})"


def print_table(report: dict):
    """Print what [`evaluate_peagle.evaluate`] returned, at most 120 columns wide."""
    ways, machine, settings, overlap = (report[name] for name in ("ways", "environment", "settings", "overlap"))
    count = len(ways["plain"]["prompts"])
    chosen = f"temperature {settings['temperature']}" if settings["temperature"] else "greedy"
    print(f"\n{settings['target']} in {machine['dtype']}, {chosen}, drafter {settings['drafter']}")
    print(
        f"{count} prompts, up to {settings['max_new_tokens']} new tokens; 95% intervals in brackets{NARROW if count < FEW else ''}"
    )
    if settings["interrupted"]:
        print("INTERRUPTED: these are only the prompts that were answered before.")
    drafts = {name: way["options"] for name, way in ways.items() if way["depth"]}
    sizes = (
        " ".join([name, *(f"{SIZES[key]}={each}" for key, each in some.items())]) for name, some in drafts.items()
    )
    print(textwrap.fill("; ".join(sizes), 120))
    print_totals(ways, count, machine["gpu"])
    print_rounds(ways)
    if len(ways["plain"]["categories"]) > 1:
        print_categories(ways)
    print("\n(host includes the wait for the GPU)" if machine["gpu"] else "")
    if not machine["gpu"]:
        print(f"The process held {machine['process_peak_bytes'] / 1e9:.2f} GB at most.")
    baseline = "prepacked plain" if settings["prepack"] else "plain"
    for name, way in ways.items():
        if way["depth"] and way["total"]["speed_up"] is not None:
            decoding, whole = (ranged(way["total"], f"{prefix}speed_up") for prefix in ("", "end_to_end_"))
            words = verdict(way["total"], machine["trusted"], count)
            print(f"{name}: {decoding} of {baseline} decoding, {whole} with reading the prompt: {words}")
    if not machine["trusted"]:
        print(textwrap.fill(f"THE TIMES ARE NOT TO BE TRUSTED: {'; '.join(machine['disturbances'])}.", 120))
    if overlap:
        print(f"{overlap['count']} of {count} prompts overlap the {overlap['conversations']} training conversations.")
        for kind, words in (("first_turn", "the same first user turn"), ("run_of_words", f"{RUN} words in a row")):
            if overlap[kind]:
                print(textwrap.fill(f"  {words}: {', '.join(overlap[kind])}", 120))
    print_differences(report)


def verdict(row: dict, trusted: bool, prompts: int) -> str:
    """Faster is what is so over all that was measured, stock decoding as well."""
    if not trusted:
        return "NOT TO BE TRUSTED"
    if prompts < FEW:  # the interval is over prompts
        return "too few prompts to tell"
    ends = {name: row["intervals"][f"speed_up{suffix}"] for suffix, name in BASELINES.items()}
    ends = {name: each for name, each in ends.items() if each and None not in each}
    if slower := [name for name, (_, high) in ends.items() if high < 1]:
        return f"slower than {' and '.join(slower)}"
    return "faster" if all(low > 1 for low, _ in ends.values()) else "no clear difference"


def print_totals(ways: dict, count: int, gpu: str | None):
    line = "{:18.18}{:>8}{:>8}  {:20}  {:20}  {:19}{:>7}{:>8}{:>6}".format
    print(
        "\n"
        + line(
            "way", "tokens/s", "overall", "over plain", "over stock", "tau", "ideal", "same", "GB" if gpu else ""
        ).rstrip()
    )
    for name, way in ways.items():
        row = way["total"]
        cells = [number(row[f"{prefix}tokens_per_second"]) for prefix in ("", "end_to_end_")]
        cells += [*(ranged(row, each) for each in SPEED_UPS), ranged(row, "tau", unit="")]
        same = f"{sum(one['identical'] == 1 for one in way['prompts'])}/{count}"
        cells += [number(row["fraction_of_ideal"], ".0%") if way["depth"] else "-"]
        cells += ["-" if row["identical"] is None else same]
        print(line(name, *cells, "" if gpu is None else f"{row['peak_memory_bytes'] / 1e9:.2f}").rstrip())


def print_rounds(ways: dict):
    print(f"\n{'ms':18}{'prefill':>8}{'round':>7}{'verify':>7}{'draft':>7}{'host':>7}", end="")
    print("  drafts pay where tau > (verify + draft + host) / plain")
    for name, way in ways.items():
        row, words = way["total"], ""
        parts = "".join(f"{number(row[f'{part}_ms']):>7}" for part in ("round", "verify", "draft", "host"))
        if (pays := row["break_even"]) and pays["needed_tau"] is not None:
            words = "{tau:.2f} {sign} {needed_tau:.2f} = ({verify_ms:.1f} + {draft_ms:.1f} + {host_ms:.1f}) / {plain_ms:.1f}"
            words = words.format(sign=">" if pays["tau"] > pays["needed_tau"] else "<=", **pays)
            words += f" in {row['drafting_rounds']} of {row['rounds']}"
        print(f"{name:18.18}{number(row['prefill_ms']):>8}{parts}  {words}".rstrip())
    drafting, width = {name: way["total"] for name, way in ways.items() if way["depth"]}, 5 * DEEPEST + 3
    if drafting:
        print(f"\n{'kept at depth':18}{'1, 2, ... jointly':{width}}where all before were kept")
    for name, row in drafting.items():
        cells = ("".join(f"{number(x, '.0%'):>5}" for x in row[kind][:DEEPEST]) for kind in ("joint", "conditional"))
        print(f"{name:18.18}{next(cells):{width}}{next(cells)}")


def print_categories(ways: dict):
    """Speed-up and tau of each category, for some ways beside one another."""
    names = [name for name in ways if name != "plain"]
    for start in range(0, len(names), BESIDE):
        some = {name: ways[name] for name in names[start : start + BESIDE]}
        rows = {c: [way["categories"][c] for way in some.values()] for c in ways["plain"]["categories"]}
        rows["geometric mean"] = [way["total"]["geometric_mean"] for way in some.values()]
        rows["worst"] = [way["total"]["worst_category"] for way in some.values()]
        print("\n" + "{:18}".format("over plain, tau") + "".join(f"{name[-13:]:>14}" for name in some))
        for label, cells in rows.items():
            cells = (
                f"{number(c['speed_up'], '.2f'):>7}x {number(c['tau'], '.2f') if 'tau' in c else '':5}" for c in cells
            )
            print(f"{label:18.18}{''.join(cells)}".rstrip())


def print_differences(report: dict):
    """Whose answers are not plain's, and why that may be."""
    cause = "THIS IS A BUG." if report["promise_broken"] else "Rounding may do that, but not in greedy float32."
    for name, way in report["ways"].items():
        if way["total"]["identical"] is None:
            print(f"{name}: its draws are others than plain's, of the same law: the answers are not compared.")
        rows = [row for row in way["prompts"] if row["identical"] == 0 and way["drafter"] is not None]
        if rows:
            print(f"!!! {name}: DRAFTED AND PLAIN ANSWERS DIFFER for {', '.join(row['id'] for row in rows)}. {cause}")
        for row in rows:
            for parting in row["partings"]:
                print(PARTING[parting["near_tie"]].format(name=row["id"], **parting))


# ---- charts ---------------------------------------------------------------------------------------------------------


def plot(report: dict, folder: Path):
    """Write `acceptance.png` (by depth), `categories.png` and, where chains or trees of several sizes were compared,
    `sizes.png`, of [`evaluate_peagle.evaluate`]'s report."""
    from matplotlib.figure import Figure  # takes a second to import

    ways = report["ways"]
    drafting = {name: way for name, way in ways.items() if way["depth"]}

    def save(name: str, draw, *shape, size):
        figure = Figure(figsize=size, layout="constrained")
        draw(*figure.subplots(*shape, squeeze=False).flat)
        if not report["environment"]["trusted"]:
            figure.suptitle("The machine was disturbed: speeds are not to be trusted.", color="firebrick")
        figure.savefig(folder / name, dpi=120)

    def acceptance(*axes):
        for ax, kind, label in zip(axes, ("joint", "conditional"), ("kept jointly", "kept where all before were")):
            for name, way in drafting.items():
                kept = np.array(way["total"][kind][:DEEPEST], dtype=float)  # None becomes NaN
                ax.plot(range(1, len(kept) + 1), kept, marker="o", label=name)
            ax.set(xlabel="depth", ylabel=f"draft tokens {label}", ylim=(-0.02, 1.02), xticks=range(1, DEEPEST + 1))
            ax.grid(alpha=0.3)
        axes[0].legend()

    def categories(*axes):
        for ax, key, label in zip(
            axes, ("speed_up", "tau"), ("speed-up over plain decoding", "acceptance length tau")
        ):
            for i, (name, way) in enumerate(drafting.items()):
                rows = way["categories"].values()
                places = np.arange(len(rows)) + 0.8 * (i + 0.5) / len(drafting) - 0.4
                ax.bar(places, [row[key] or 0.0 for row in rows], 0.8 / len(drafting), label=name)
            ax.axhline(1, color="black", linewidth=0.8)
            ax.set_xticks(range(len(rows)), way["categories"], rotation=30, ha="right")
            ax.set(ylabel=label)
        axes[0].legend()

    def sizes(*axes):
        panels = product((("speed_up", "speed-up over plain"), ("tau", "acceptance length tau")), swept.items())
        for ax, ((key, label), (xlabel, kinds)) in zip(axes, panels):
            for kind, points in kinds.items():
                middle = np.array([total[key] for _, total in points], dtype=float)
                ends = [(total["intervals"] or {}).get(key, (None, None)) for _, total in points]
                ends = np.array(ends, dtype=float).T
                ax.errorbar(
                    [size for size, _ in points], middle, abs(ends - middle), marker="o", capsize=3, label=kind
                )
            ax.set(
                xlabel=xlabel, ylabel=label, xticks=sorted({size for points in kinds.values() for size, _ in points})
            )
            ax.grid(alpha=0.3)
            ax.legend()

    if drafting:
        save("acceptance.png", acceptance, 1, 2, size=(10, 4))
        save("categories.png", categories, 2, 1, size=(max(6, len(ways["plain"]["categories"])), 7))
    if swept := sizes_of(ways):
        save("sizes.png", sizes, 2, len(swept), size=(5 * len(swept), 7))


def sizes_of(ways: dict) -> dict[str, dict[str, list]]:
    """By label of the axis, then by kind of drafts, `(size, total)` of the ways that differ in size alone, ascending."""
    found = {}
    keys = {"chain": "num_assistant_tokens", "sequential": "num_assistant_tokens", "tree": "draft_tree"}
    for kind, key in keys.items():
        same = [way for name, way in ways.items() if name.partition(":")[0] == kind and "+" not in name]
        points = sorted(((way["options"][key], way["total"]) for way in same), key=lambda point: point[0])
        if len({size for size, _ in points}) > 1:
            found.setdefault(f"draft tokens per round, {SIZES[key]}", {})[kind] = points
    return found
