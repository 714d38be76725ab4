"""What training is judged by: the acceptance length of real decoding on held-out prompts, and its curve over the tokens."""

import csv
import os
from collections.abc import Iterable

import numpy as np
import torch
from transformers import TrainerCallback

from decoding_peagle import DecodingStats


def prompts_of(blocks: Iterable[dict], longest: int) -> Iterable[list[int]]:
    """The prompts of packed blocks: of each document, the ids before the first that the target generated.

    Documents without such ids, and prompts of more than `longest` tokens, are left out.
    """
    for block in blocks:
        ends = np.cumsum(block["seq_lengths"])
        for start, end in zip(ends - block["seq_lengths"], ends):
            answer = np.flatnonzero(block["loss_mask"][start:end])
            if len(answer) and 0 < answer[0] <= longest:
                yield list(block["input_ids"][start : start + answer[0]])


@torch.no_grad()
def decode(target, drafter, prompts: list[list[int]], max_new_tokens: int) -> dict[str, float]:
    """Answer every prompt greedily with the drafter.

    Returns:
        `dict[str, float]`: `tau`, tokens per target forward over all prompts, and `acceptance_depth_<d>`, the share of the
        draft tokens at a depth that were kept where all before them were (left out at depths that were never reached).
    """
    total = DecodingStats()
    with drafter.attach(target):
        for prompt in prompts:
            ids = torch.tensor([prompt], device=target.device)
            output = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=drafter,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
            )
            total += output.stats
    metrics = {"tau": total.tau}
    for depth in range(drafter.config.speculation_depth):
        if judged := total.judged(depth):
            metrics[f"acceptance_depth_{depth}"] = total.depth_counts(depth)[0] / judged
    return metrics


class LearningCurve(TrainerCallback):
    """Keeps `learning_curve.csv` and `learning_curve.png` in the output folder: tau against training tokens."""

    def on_evaluate(self, args, state, control, **kwargs):
        rows = [entry for entry in state.log_history if "eval_tau" in entry]
        if not state.is_world_process_zero or not rows:
            return
        names = list(dict.fromkeys(name for row in rows for name in row if name.startswith("eval_")))
        names = ["step", "num_input_tokens_seen", *names]
        os.makedirs(args.output_dir, exist_ok=True)
        with open(os.path.join(args.output_dir, "learning_curve.csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        plot(rows, os.path.join(args.output_dir, "learning_curve.png"))


def plot(rows: list[dict], path: str):
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["num_input_tokens_seen"] for row in rows], [row["eval_tau"] for row in rows], marker="o")
    axes.set(xlabel="training tokens", ylabel="acceptance length tau, held-out prompts", ylim=(1, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
