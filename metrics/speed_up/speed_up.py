"""The speed-up of one way of decoding over another, as an `evaluate` module."""

import datasets
import evaluate
import numpy as np


DESCRIPTION = """
Speed-up: the tokens per second of one way of decoding over those of a baseline that answered the same prompts. Tokens and
seconds are summed over all prompts, so that long answers weigh more.
"""
INPUTS = """
tokens, seconds (`list[int]`, `list[float]`): For each prompt, the tokens of the answer and the time that they took.
baseline_tokens, baseline_seconds: The same of the baseline, in the same order of the prompts.

Returns `speed_up`, `tokens_per_second` and `baseline_tokens_per_second` (`float`).

>>> metric = evaluate.load("metrics/speed_up")
>>> metric.compute(tokens=[60, 40], seconds=[3.0, 2.0], baseline_tokens=[60, 40], baseline_seconds=[6.0, 4.0])
{'speed_up': 2.0, 'tokens_per_second': 20.0, 'baseline_tokens_per_second': 10.0}
"""


def tokens_per_second(tokens: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Tokens `(..., prompts)` over their seconds `(..., prompts)`: `(...)`."""
    return np.sum(tokens, axis=-1) / np.sum(seconds, axis=-1)


def speed_up(tokens, seconds, baseline_tokens, baseline_seconds) -> np.ndarray:
    """Tokens per second over those of the baseline, all `(..., prompts)`: `(...)`."""
    return tokens_per_second(tokens, seconds) / tokens_per_second(baseline_tokens, baseline_seconds)


class SpeedUp(evaluate.Metric):
    def _info(self):
        kinds = {"tokens": "int64", "seconds": "float64", "baseline_tokens": "int64", "baseline_seconds": "float64"}
        features = datasets.Features({name: datasets.Value(kind) for name, kind in kinds.items()})
        return evaluate.MetricInfo(description=DESCRIPTION, citation="", inputs_description=INPUTS, features=features)

    def _compute(self, tokens, seconds, baseline_tokens, baseline_seconds) -> dict:
        given = [np.asarray(column) for column in (tokens, seconds, baseline_tokens, baseline_seconds)]
        if not all((np.isfinite(column) & (column >= 0)).all() and column.sum() > 0 for column in given):
            raise ValueError("Speed-up: tokens and seconds must be at least 0 for every prompt, and above 0 in all.")
        return {
            "speed_up": float(speed_up(tokens, seconds, baseline_tokens, baseline_seconds)),
            "tokens_per_second": float(tokens_per_second(tokens, seconds)),
            "baseline_tokens_per_second": float(tokens_per_second(baseline_tokens, baseline_seconds)),
        }
