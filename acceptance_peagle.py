"""What training is judged by: the acceptance length of real decoding on held-out prompts, and its curve over the tokens.
And how sure the drafter may be of its drafts, by the held-out texts themselves.
"""

import csv
import json
import os
from collections.abc import Iterable

import numpy as np
import torch
from transformers import TrainerCallback

from configuration_peagle import DrafterConfig
from decoding_peagle import DecodingStats
from environment_peagle import command_line, environment
from tree_peagle import fit_temperature


# Rows of scores that the temperature of a depth is fitted to: it is known to about 2% then, and to a tenth by the fewest.
FEWEST_ROWS, MOST_ROWS = 64, 4096
# Exponents c of the curves a - b * tokens**-c that `extrapolate` tries. About 0 they are lines in the logarithm of the tokens,
# below it they bend upwards: without those, noise about a line could only lower what it leads to. None is 0 itself.
EXPONENTS = np.linspace(-0.3, 2, 116) + 1e-4
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
def decode(target, drafter, prompts: list[list[int]], max_new_tokens: int, **options) -> dict[str, float]:
    """Answer every prompt greedily with the drafter's chains, which is what the same drafter does on any machine.

    `options` are further ones of `generate`.

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
                **options,
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
    """Keeps `learning_curve.csv` and `.png` in the output folder, tau against training tokens, and in `.json` what made them."""

    def on_evaluate(self, args, state, control, model, **kwargs):
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
        with open(os.path.join(args.output_dir, "learning_curve.json"), "w") as file:
            json.dump({"settings": {"command": command_line()}, "environment": environment(model)}, file, indent=2)


def plot(rows: list[dict], path: str):
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["num_input_tokens_seen"] for row in rows], [row["eval_tau"] for row in rows], marker="o")
    axes.set(xlabel="training tokens", ylabel="acceptance length tau, held-out prompts", ylim=(1, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def extrapolate(tokens: list[float], taus: list[float], factor: float = 10.0, draws: int = 1000) -> tuple:
    """What tau would be after `factor` times the last of the tokens, if the curve keeps the form a - b * tokens**-c.

    Args:
        tokens (`list[float]`, `(n,)`): training tokens, above 0 and rising.
        taus (`list[float]`, `(n,)`): the acceptance length after so many tokens.

    Returns:
        `(tau, low, high)`: the fit of least squares, and the 95% interval of such fits to the fitted curve with the
        deviations from it drawn anew. That is the noise of the points alone: a curve that levels off later ends lower.

    Raises:
        ValueError: fewer than five points, from which a form with three numbers tells nothing.
    """
    if len(tokens) < 5:
        raise ValueError(f"A learning curve needs five points or more to go on from, this one has {len(tokens)}.")
    ratios, taus = np.asarray(tokens, float) / tokens[-1], np.asarray(taus, float)

    def terms(
        ratios,
    ):  # (exponents, n, 2), of which a fit takes a weighted sum; about 0 the second is the logarithm
        bent = (1 - ratios ** -EXPONENTS[:, None]) / EXPONENTS[:, None]
        return np.stack([np.ones_like(bent), bent], axis=-1)

    weights = np.linalg.pinv(
        terms(ratios)
    )  # (exponents, 2, n): least squares for a given exponent is linear in the taus
    along, ahead = terms(ratios) @ weights, (terms(np.array([factor])) @ weights)[:, 0]

    def fit(curves):  # (m, n) to the fitted curves and the tau ahead, each with its best exponent
        fitted = np.einsum("eij,mj->mei", along, curves)
        best = ((fitted - curves[:, None]) ** 2).sum(-1).argmin(-1)
        return fitted[np.arange(len(curves)), best], (ahead[best] * curves).sum(-1)

    fitted, (tau,) = fit(taus[None])
    # Three numbers were fitted, so the deviations are smaller than the noise.
    deviations = (taus - fitted[0]) * (len(taus) / (len(taus) - 3)) ** 0.5
    drawn = np.random.default_rng(0).choice(deviations, size=(draws, len(taus)))
    low, high = np.quantile(fit(fitted + drawn)[1], [0.025, 0.975])
    return float(tau), float(low), float(high)
