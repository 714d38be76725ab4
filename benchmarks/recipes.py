"""Which recipe drafts best for the same data and steps: `python benchmarks/recipes.py table.jsonl --feature_dir features`.

Every line is one run of `train_peagle.py` with the `options` named, and with those of the command line. It is judged on the
held-out conversations: by the true tau of greedy decoding, and by the share of right top-1 draft tokens per depth over all
slots, which wavers less. Lines that the file has already are not run again.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from environment_peagle import command_line  # noqa: E402


RECIPES = {
    "kl, uniform": [],
    "kl, uniform, other seed": ["--seed", "43"],
    "ce, uniform": ["--loss", "ce"],
    "lk, uniform": ["--loss", "lk"],
    "kl, decay": ["--depth_weights", "decay"],
    "kl, survival": ["--depth_weights", "survival"],
    "lk, survival": ["--loss", "lk", "--depth_weights", "survival"],
    "kl, feature noise 0.1": ["--feature_noise", "0.1"],
    "markov head": ["--markov_rank", "64"],
    "markov head, survival": ["--markov_rank", "64", "--depth_weights", "survival"],
    "without fc_norm": ["--fc_norm", "false"],
    "mask row trained": ["--embeddings", "mask_row"],
    "embeddings trained": ["--embeddings", "trained"],
    "one token after the other": ["--parallel_drafting", "false"],
    "2 layers": ["--num_layers", "2"],
    "rate 2e-3": ["--learning_rate", "2e-3"],
    "muon": ["--muon"],
    "muon, rate 2e-3": ["--muon", "--learning_rate", "2e-3"],
    "markov head, survival, muon, rate 2e-3": "--markov_rank 64 --depth_weights survival --muon --learning_rate 2e-3".split(),
}


def run(options: list[str]) -> dict:
    """The evaluation at the end of one training run, what it ran on, and the minutes that it took in all."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "train_peagle.py",
            "--output_dir",
            folder,
            "--save_strategy",
            "no",
            "--eval_strategy",
            "no",
            "--yes",
        ]
        subprocess.run([sys.executable, *command, *options], cwd=ROOT, check=True)
        with open(Path(folder, "learning_curve.csv"), newline="") as file:
            *_, last = csv.DictReader(file)
        environment = json.loads(Path(folder, "learning_curve.json").read_text())["environment"]
    numbers = {name: float(value) for name, value in last.items()} | {"minutes": (time.perf_counter() - start) / 60}
    return {"environment": environment} | numbers


def table(lines: list[dict]):
    print(f"\n{'recipe':25} {'tau':>5}  right at depth 0, 1, ...   minutes")
    for line in lines:
        right = (line[name] for name in sorted(line) if name.startswith("eval_accuracy_depth_"))
        print(
            f"{line['recipe']:25} {line['eval_tau']:5.3f}  {'  '.join(f'{share:.3f}' for share in right)}  {line['minutes']:6.1f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="the table, one JSON object a line; all else goes to train_peagle.py")
    arguments, options = parser.parse_known_args()
    path = arguments.path
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []
    done = {line["recipe"] for line in lines}
    for recipe, own in RECIPES.items():
        if recipe not in done:
            made = {"recipe": recipe, "options": own, "command": command_line()}
            lines.append(made | run([*options, *own]))
            with open(path, "a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    table(lines)
