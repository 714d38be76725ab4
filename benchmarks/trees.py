"""What making a tree costs after the drafter's forward: `python benchmarks/trees.py [--output file.json]`.

From the logits of four depths, random ones here, to a tree of 16 nodes, for the draft vocabularies of three targets; with
independent depths and with a Markov head of rank 64. A machine at work on other things takes many times as long, as two
threads wait for each other: look at the spread.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tables import measure_tables, parser


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from environment_peagle import environment  # noqa: E402
from heads_peagle import MarkovHead  # noqa: E402
from inference_peagle import load_drafter  # noqa: E402
from tree_peagle import best_first, candidates  # noqa: E402


VOCABULARIES = (8_192, 49_152, 262_144)  # the default drafter's; all of SmolLM2's, and of Gemma-3's
DEPTHS, NODES, RANK, REPEATS, WARM = 4, 16, 64, 200, 20


@torch.no_grad()
def milliseconds(logits: torch.Tensor, transition=None) -> tuple[float, float]:
    """The median, and by how much of it the middle half differs."""
    times = []
    for _ in range(WARM + REPEATS):
        start = time.perf_counter()
        best_first(candidates(logits, NODES, transition=transition), NODES)
        times.append(1000 * (time.perf_counter() - start))
    low, middle, high = np.quantile(times[WARM:], [0.25, 0.5, 0.75])
    return middle, (high - low) / middle


def trees() -> Iterator[dict]:
    """A row for each draft vocabulary."""
    for vocabulary in VOCABULARIES:
        torch.manual_seed(0)
        logits, head = 3 * torch.randn(DEPTHS, vocabulary), MarkovHead(vocabulary, RANK)
        row = {"draft vocabulary": vocabulary}
        for name, transition in (("independent depths", None), ("Markov head", head.between)):
            middle, spread = milliseconds(logits, transition)
            row |= {f"{name}, ms": round(middle, 2), f"{name}, spread": f"{spread:.0%}"}
        yield row


if __name__ == "__main__":
    measure_tables({"trees": trees}, environment(load_drafter(str(ROOT)).float()), parser(__doc__).parse_args().output)
