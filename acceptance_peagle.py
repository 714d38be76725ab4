"""What training is judged by: the acceptance length of real decoding on held-out prompts, and its curve over the tokens.
And how sure the drafter may be of its drafts, by the held-out texts themselves.
"""

import csv
import os
from collections.abc import Iterable

import numpy as np
import torch
from transformers import TrainerCallback

from configuration_peagle import DrafterConfig
from decoding_peagle import DecodingStats
from tree_peagle import fit_temperature


# Rows of scores that the temperature of a depth is fitted to: it is known to about 2% then, and to a tenth by the fewest.
FEWEST_ROWS, MOST_ROWS = 64, 4096
# Scores that are kept for it in all (256 MB in float32), where the draft vocabulary is large.
MAX_SCORES = 2**26


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
    """Answer every prompt greedily with the drafter's chains, which is what the same drafter does on any machine.

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
                num_assistant_tokens=drafter.config.speculation_depth,
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


class Calibration:
    """Scores of the first held-out slots of each depth with what came there, for [`DrafterConfig`]'s temperatures."""

    def __init__(self, config: DrafterConfig):
        most = MAX_SCORES // (config.num_depths * config.draft_vocab_size)
        self.most = min(max(most, FEWEST_ROWS), MOST_ROWS)
        self.rows = [[] for _ in range(config.num_depths)]  # of each depth: scores and label of a slot

    def add(self, depths: torch.LongTensor, scores: torch.Tensor, labels: torch.LongTensor):
        """`scores` `(n, draft_vocab_size)` at `depths` `(n,)`; `labels` `(n,)` index the draft vocabulary, -100 for others."""
        for depth, rows in enumerate(self.rows):
            new = ((depths == depth) & (labels >= 0)).nonzero()[: self.most - len(rows), 0]
            rows += zip(scores[new].detach(), labels[new].tolist())

    def temperatures(self) -> list[float]:
        """One for each depth; 1.0 where too little was seen to tell."""
        return [fit(rows) if len(rows) >= FEWEST_ROWS else 1.0 for rows in self.rows]


def fit(rows: list[tuple[torch.Tensor, int]]) -> float:
    scores, labels = zip(*rows)
    return fit_temperature(torch.stack(scores), torch.tensor(labels, device=scores[0].device))


class LearningCurve(TrainerCallback):
    """Keeps `learning_curve.csv` and `learning_curve.png` in the output folder: tau against training tokens."""

    def on_evaluate(self, args, state, control, **kwargs):
        # The last evaluation is of the drafter that is kept, whose step may have been another.
        rows = {entry["step"]: entry for entry in reversed(state.log_history) if "eval_tau" in entry}
        rows = [rows[step] for step in sorted(rows)]
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
