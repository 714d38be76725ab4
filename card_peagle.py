"""The numbers of the model card: `python card_peagle.py` writes them into README.md from the files in `results/`.

They stand between `<!-- begin NAME -->` and `<!-- end NAME -->`, each block with the command that made its numbers and what
it ran on, and in the front matter's `model-index`. With `--check` nothing is written: where README has other numbers than the
files, the differences are shown and the exit code is 1. The text around the blocks is written by hand.
"""

import argparse
import csv
import difflib
import json
import re
import sys
from functools import partial
from pathlib import Path

from huggingface_hub import ModelCard

from card_blocks_peagle import (
    categories_block,
    curve_block,
    model_index,
    recipes_block,
    rows_block,
    ways_block,
)


ROOT = Path(__file__).resolve().parent
MARKER = re.compile(r"<!-- (begin|end) (\S+) -->")
BLOCK = re.compile(r"(<!-- begin (\S+) -->)(.*?)(<!-- end \2 -->)", re.DOTALL)
INDEXED = ("spec_bench", "prompts")  # the reports in the model-index


def read(path: Path):
    """A report (`.json`), or a list of dicts, one a line (`.jsonl`, `.csv`)."""
    if not path.is_file():
        raise FileNotFoundError(
            f"README has numbers of {path.name}, but there is no {path}: make it, or drop the block."
        )
    text = path.read_text()
    if path.suffix == ".csv":
        return [*csv.DictReader(text.splitlines())]
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    report = json.loads(text)
    if report.get("promise_broken"):
        raise ValueError(f"{path} has drafted answers that are not the plain ones. That is a bug, not a result.")
    if report["settings"].get("interrupted"):
        raise ValueError(f"{path} is of an interrupted run, which left out prompts: make it again, to the end.")
    return report


BLOCKS = {  # by name, the files of results/ and what writes the block of what they hold
    "spec_bench": (["spec_bench.json"], ways_block),
    "spec_bench_categories": (["spec_bench.json"], categories_block),
    "prompts": (["prompts.json"], ways_block),
    "recipes": (["recipes.jsonl"], recipes_block),
    "learning_curve": (["learning_curve.csv", "learning_curve.json"], curve_block),
    "learning_curve_second": (["learning_curve_second.csv", "learning_curve_second.json"], curve_block),
}
PROGRAMS = {"training": "step length shape ways", "data_steps": "steps memory extraction", "trees": "trees"}
for program, names in PROGRAMS.items():
    for name in names.split():
        BLOCKS[name if name == program else f"{program}_{name}"] = (
            [f"{program}.json"],
            partial(rows_block, name=name),
        )


def write_card(text: str, results: Path) -> str:
    """README's `text` with the numbers of the files in `results`.

    Raises:
        FileNotFoundError: A file that a block is made of is not there.
        ValueError: A block has no end or is unknown, a run was interrupted, or drafted answers are not the plain ones.
    """
    markers = MARKER.findall(text)
    begun = [name for side, name in markers if side == "begin"]
    if markers != [(side, name) for name in begun for side in ("begin", "end")]:
        raise ValueError(f"README's blocks do not pair, each with its end before the next: {markers}")
    if unknown := sorted({*begun} - {*BLOCKS}):
        raise ValueError(
            f"README has blocks that nothing writes: {', '.join(unknown)}. There are {', '.join(BLOCKS)}."
        )

    def written(match: re.Match) -> str:
        begin, name, _, end = match.groups()
        files, write = BLOCKS[name]
        block = write(*(read(results / file) for file in files))
        return f"{begin}\n{block}\n{end}"

    card = ModelCard(BLOCK.sub(written, text))
    paths = [results / f"{stem}.json" for stem in INDEXED]
    found = [model_index(read(path), path.stem) for path in paths if path.is_file()]
    card.data.eval_results = sum(found, [])
    card.data.model_name = f"P-EAGLE for {card.data.base_model.split('/')[-1]}"
    return str(card)


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 where README differs")
    check, readme = parser.parse_args(argv).check, root / "README.md"
    text = readme.read_text()
    card = write_card(text, root / "results")
    if not check:
        readme.write_text(card)
        return 0
    sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), card.splitlines(True), "README.md", "results/"))
    return int(text != card)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
