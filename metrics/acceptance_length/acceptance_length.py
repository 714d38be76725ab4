"""The acceptance length tau of speculative decoding, as an `evaluate` module."""

import datasets
import evaluate
import numpy as np


DESCRIPTION = """
Acceptance length (tau): how many tokens a forward of the target gives on average, its own token included. Plain decoding has
1.0. Rounds are counted over all prompts, so that long answers weigh more.
"""
INPUTS = """
emitted (`list[list[int]]`): For each prompt, the tokens that each round emitted, up to the end of the answer. A round is a
    forward of the target after the one that reads the prompt. Of this project's drafters, `stats.emitted` of each result.

Returns `acceptance_length` (`float`), and `tokens` and `rounds` (`int`), whose ratio it is.

>>> metric = evaluate.load("metrics/acceptance_length")
>>> metric.compute(emitted=[[3, 1, 2], [1, 1, 1, 1]])
{'acceptance_length': 1.4285714285714286, 'tokens': 10, 'rounds': 7}
"""
CITATION = "Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv 2211.17192"


def acceptance_length(emitted: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """Tokens `(..., prompts)` that so many rounds `(..., prompts)` emitted, over the rounds: `(...)`."""
    return np.sum(emitted, axis=-1) / np.sum(rounds, axis=-1)


class AcceptanceLength(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"emitted": datasets.List(datasets.Value("int64"))})
        return evaluate.MetricInfo(
            description=DESCRIPTION, citation=CITATION, inputs_description=INPUTS, features=features
        )

    def _compute(self, emitted: list[list[int]]) -> dict:
        rounds = [len(prompt) for prompt in emitted]
        if not sum(rounds) or min(map(min, filter(None, emitted))) < 1:
            raise ValueError("Acceptance length: pass at least one round; every round emits one token or more.")
        tokens = [sum(prompt) for prompt in emitted]
        tau = float(acceptance_length(tokens, rounds))
        return {"acceptance_length": tau, "tokens": sum(tokens), "rounds": sum(rounds)}
