"""What the blocks of the model card say: Markdown of the files in `results/`, which `card_peagle.py` writes into README.md."""

import re
from pathlib import Path

from huggingface_hub import EvalResult

from acceptance_peagle import extrapolate


SPENT = {"round": "a round, ms", "verify": "of it verification", "draft": "drafter", "host": "all else"}


def ways_of(report: dict) -> dict:
    """By name, the ways of decoding that a report of `evaluate_peagle.py` compares, without the intervals of one prompt alone."""
    return (report if count_of(report) > 1 else without_intervals(report))["ways"]


def count_of(report: dict) -> int:
    """The prompts of a report."""
    return len(report["ways"]["plain"]["prompts"])


def without_intervals(value):
    """A report, or a part of it, whose ratios have no intervals."""
    if not isinstance(value, dict):
        return value
    return {name: without_intervals(item) for name, item in value.items() if name != "intervals"}


def is_ours(name: str) -> bool:
    """Whether a way drafts with the drafter of this folder alone."""
    return re.fullmatch(r"(chain|tree|auto)(:\d+)?", name) is not None


# ---- what stands in a cell ------------------------------------------------------------------------------------------


def cell(value, form: str | None = None) -> str:
    """A number in some three digits or by the format `form`, a text as it is, and a dash for None."""
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:{form or (',' if isinstance(value, int) else '.1f' if abs(value) >= 10 else '.2f')}}"


def ranged(row: dict, name: str, unit: str = "x") -> str | None:
    """A ratio with its 95% interval if it has one: `1.22x (1.14 to 1.30)`."""
    if row.get(name) is None:
        return None
    low, high = (row.get("intervals") or {}).get(name) or (None, None)
    return f"{row[name]:.2f}{unit}" + ("" if low is None else f" ({low:.2f} to {high:.2f})")


def table(rows: list[dict]) -> str:
    """A table of Markdown, headed by the keys of the first row, without the columns in which no row has anything."""
    heads = [head for head in rows[0] if any(row[head] is not None for row in rows)]
    lines = [heads, ["---"] * len(heads), *([cell(row[head]) for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(report: dict) -> str:
    return "prepacked plain" if report["settings"]["prepack"] else "plain"


def label(name: str, way: dict, report: dict) -> str:
    kind, _, lookup = name.partition("+")
    words = {
        "stock": "stock plain",
        "plain": plain(report),
        "lookup": "prompt lookup of {prompt_lookup_num_tokens}",
        "chain": "chain, K = {num_assistant_tokens}",
        "tree": "tree, N = {draft_tree}",
        "auto": "`auto`" if lookup else "`auto`, the default",
        "sequential": "sequential drafter, K = {num_assistant_tokens}",
    }[kind.partition(":")[0]]
    words += ", with prompt lookup of {prompt_lookup_num_tokens}" if lookup else ""
    return words.format(**way["options"])


def counted(report: dict) -> str:
    count = count_of(report)
    return f"{count} prompt{'s' * (count != 1)}"


def conditions(report: dict) -> str:
    settings = report["settings"]
    chosen = f"temperature {settings['temperature']}" if settings["temperature"] else "greedy"
    words = f"{counted(report)}, up to {settings['max_new_tokens']} new tokens each, {chosen}"
    if report.get("overlap"):
        words += "; {count} of them overlap the {conversations:,} training conversations".format(**report["overlap"])
    return words


def distrust(report: dict) -> list[str]:
    """Why its times are not to be trusted; empty where they are."""
    machine = report["environment"]
    return [*machine.get("disturbances", []), *filter(None, [machine.get("load_warning")])]


def machine(report: dict) -> str:
    made = report["environment"]
    place = made["gpu"] or f"{made['cpu']}, {made['threads']} thread{'s' * (made['threads'] > 1)}"
    versions = ", ".join(f"{name} {made[name]}" for name in ("python", "torch", "transformers"))
    warning = "".join(f". **The times are not to be trusted: {reason.rstrip('.')}**" for reason in distrust(report))
    return f"{place}, {made['dtype']}, {versions}{warning}"


def origin(report: dict) -> str:
    """What a block ends with: the command that made its numbers, and what it ran on."""
    return f"```bash\n{report['settings']['command']}\n```\n\n{machine(report)}."


# ---- blocks ---------------------------------------------------------------------------------------------------------


def ways_block(report: dict) -> str:
    """What each way gains, and what its rounds take."""
    gains, rounds = [], []
    for name, way in ways_of(report).items():
        row, called, same = way["total"], {"": label(name, way, report)}, None
        if row.get("identical") is not None:
            same = f"{sum(one['identical'] == 1 for one in way['prompts'])} of {len(way['prompts'])}"
        gains.append(
            called
            | {
                "tau": ranged(row, "tau", ""),
                "tokens/s": cell(row["tokens_per_second"], ".1f"),
                "with reading the prompt": row.get("end_to_end_tokens_per_second"),
                f"over {plain(report)}": ranged(row, "speed_up"),
                "over stock plain": ranged(row, "speed_up_over_stock"),
                "answers as plain": same,
            }
        )
        if is_ours(name) or name.startswith("sequential"):
            kept = {"kept at depth 1 / 2 / ..., jointly": " / ".join(cell(share, ".0%") for share in row["joint"])}
            spent = {title: cell(row[f"{part}_ms"], ".1f") for part, title in SPENT.items()}
            rounds.append(called | kept | spent | {"pays above tau": (row["break_even"] or {}).get("needed_tau")})
    brackets = " (95% intervals over prompts in brackets)" * (count_of(report) > 1)
    return "\n\n".join(
        [f"{conditions(report)}{brackets}:", table(gains), *([table(rounds)] if rounds else []), origin(report)]
    )


def categories_block(report: dict) -> str:
    """The tau of each way of drafting by category, and what `auto` gains.

    ValueError: The report has no way `auto`.
    """
    ways = ways_of(report)
    if "auto" not in ways:
        raise ValueError(
            f"No way `auto` is in the report of `{report['settings']['command']}`, and the table by category shows what it "
            "gains: measure again with `auto` among the --ways."
        )
    drafts = {f"tau, {label(name, way, report)}": way for name, way in ways.items() if is_ours(name)}
    auto, prompts = ways["auto"], [row["category"] for row in ways["auto"]["prompts"]]
    speeds = {plain(report): "speed_up", "stock plain": "speed_up_over_stock"}

    def line(name, count, taus, gain):
        gains = {f"`auto` over {other}": ranged(gain, key) for other, key in speeds.items()}
        lengths = {head: ranged(row, "tau", "") for head, row in taus.items()}
        return {"category": name, "prompts": count} | lengths | gains

    lines = [
        line(name, prompts.count(name), {key: way["categories"][name] for key, way in drafts.items()}, gain)
        for name, gain in auto["categories"].items()
    ]
    totals = {key: way["total"] for key, way in drafts.items()}
    lines.append(line("all; geometric mean over categories", len(prompts), totals, auto["total"]["geometric_mean"]))
    notes, worst = [], auto["total"]["worst_category"]
    for other, key in speeds.items():
        without = [name for name, gain in auto["categories"].items() if gain[key] is None]
        if 0 < len(without) < len(auto["categories"]):  # without any, there is no such mean
            notes.append(f"Not in the geometric mean over {other}, as no speed-up is known: {', '.join(without)}.")
    if worst["speed_up"] is not None:
        notes.append("`auto` gains least in {name}: {speed_up:.2f}x.".format(**worst))
    return "\n\n".join([f"{conditions(report)}:", table(lines), *notes, origin(report)])


def recipes_block(lines: list[dict]) -> str:
    """One row for each run of `benchmarks/recipes.py`."""
    best, rows = max(line["eval_tau"] for line in lines), []
    for line in lines:
        tau, shares = f"{line['eval_tau']:.2f}", [line[key] for key in sorted(line) if "eval_accuracy_depth_" in key]
        row = {"recipe": f"`{' '.join(line['options'])}`" if line["options"] else "the defaults"}
        row["tau"] = f"**{tau}**" if line["eval_tau"] == best else tau
        rows.append(row | {f"right at depth {i}": f"{share:.1%}" for i, share in enumerate(shares, 1)})
    commands = "\n".join(dict.fromkeys(line["command"] for line in lines))
    machines = "; ".join(dict.fromkeys(machine(line) for line in lines if "environment" in line))
    return f"{table(rows)}\n\n```bash\n{commands}\n```\n\n{machines or 'The machine was not recorded'}."


def curve_block(rows: list[dict], made: dict) -> str:
    """Tau against training tokens, and where that leads; a run that started from a drafter learned more than its own tokens."""
    tokens, taus = ([float(row[key]) for row in rows] for key in ("num_input_tokens_seen", "eval_tau"))
    points = table([{"training tokens": int(count), "tau": tau} for count, tau in zip(tokens, taus)])
    if "--init_from_drafter" in made["settings"]["command"]:
        return f"{points}\n\n{origin(made)}"
    words = "Extrapolated, not measured: ten times the tokens, {:,.0f}, would bring tau {:.2f} ({:.2f} to {:.2f}) "
    words += "if the curve keeps the form a - b * tokens^-c."
    return "\n\n".join([points, words.format(10 * tokens[-1], *extrapolate(tokens, taus)), origin(made)])


def rows_block(report: dict, name: str) -> str:
    """A table that a program of `benchmarks/` wrote with `--output`."""
    if name not in report["tables"]:
        raise ValueError(f"There is no table {name} in {report['settings']['command']}: have it made as well.")
    return f"{table(report['tables'][name])}\n\n{origin(report)}"


def prompts_of(report: dict) -> str:
    """What the model-index calls the prompts of a report, from its settings."""
    settings = report["settings"]
    if settings["held_out_file"]:
        # That they are the target's own is known of the drafter in this folder, not from the report.
        return "held-out chats of the target's own"
    words = f"{Path(settings['prompts']).name}, {counted(report)}"
    return words + (f", at most {settings['per_category']} of each category" if settings["per_category"] else "")


def model_index(report: dict, stem: str) -> list[EvalResult]:
    """Tau and speed-up of this drafter's ways, as far as known; no speed-up where the times are not to be trusted."""
    metrics = {"tau": "acceptance length tau", "speed_up": f"speed-up over {plain(report)} decoding"}
    if distrust(report):
        del metrics["speed_up"]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=stem,
            dataset_name=prompts_of(report),
            metric_type=metric,
            metric_name=f"{title}, {label(name, way, report)}",
            metric_value=round(way["total"][metric], 3),
        )
        for name, way in ways_of(report).items()
        if is_ours(name)
        for metric, title in metrics.items()
        if way["total"][metric] is not None
    ]
