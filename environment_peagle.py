"""What a measurement was made on, and whether other programs disturbed it."""

import platform
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import transformers


ROOT = Path(__file__).resolve().parent
# Above these, times are not to be trusted: the part of the cores that other programs have asked of late, and that they got
# during the run; by how much the middle half of the repeated plain steps may differ; and the last third from the first.
MOST_LOAD, MOST_SHARE, MOST_SPREAD, MOST_DRIFT = 0.5, 0.1, 0.15, 0.15


def command_line() -> str:
    """The command that this process was started with, for reports: those are shared, the machine's folders and tokens are not."""
    return re.sub(r"\bhf_\w{16,}", "hf_...", shlex.join(["python", *sys.argv]).replace(f"{ROOT}/", ""))


def environment(target) -> dict:
    """Versions, machine and models."""
    # Where there is no such file, or it names no model, Python's own word has to do.
    cpu = re.findall(r"model name\s*: (.+)", "".join(file.read_text() for file in Path("/proc").glob("cpuinfo")))
    git = subprocess.run("git describe --always --dirty", shell=True, cwd=ROOT, capture_output=True, text=True)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "git": git.stdout.strip() or None,
        "cpu": cpu[0] if cpu else platform.processor(),
        "gpu": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "cores": psutil.cpu_count(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.config.get_text_config()._attn_implementation,
    }


def process_peak() -> int:
    """Bytes: the most main memory that this process has held since it began (resident set), what loading took included."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # which Windows lacks, and training imports this module too

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Disturbance:
    """What other programs do to a measurement, which begins when this is made.

    load (`float`): What they have asked of late, in cores.
    """

    def __init__(self):
        self.own, self.start = time.process_time(), time.perf_counter()
        # A second of our own CPU time within the last minute adds about 1/60 to the one-minute load average.
        self.load = max(0.0, psutil.getloadavg()[0] - min(self.own / 60, torch.get_num_threads()))
        psutil.cpu_percent()  # the next call gives the share since this one

    def lap(self) -> dict:
        """`seconds` since the last lap or the beginning, the part `others_share` of all cores that other programs had in them,
        and their `load_of_others` before the first."""
        own, now = time.process_time(), time.perf_counter()
        seconds, self.start = now - self.start, now
        share, self.own = psutil.cpu_percent() / 100 - (own - self.own) / seconds / psutil.cpu_count(), own
        return {"load_of_others": self.load, "others_share": share, "seconds": seconds}


def reasons(load: float, share: float = 0.0, spread: float = 0.0, drift: float = 0.0) -> list[str]:
    """Why times are not to be trusted; for the arguments see [`disturbances`]."""
    cores = psutil.cpu_count()
    words = {
        f"other programs asked for {load:.1f} of {cores} cores before the run": load > MOST_LOAD * cores,
        f"other programs took {share:.0%} of the cores during the run": share > MOST_SHARE,
        f"the middle half of the repeated plain steps differed by {spread:.0%}": spread > MOST_SPREAD,
        f"the last third of the repeated plain steps took {1 + drift:.2f} times as long as the first": (
            max(drift, -drift / (1 + drift)) > MOST_DRIFT
        ),
    }
    return [word for word, present in words.items() if present]


def disturbances(laps: list[dict], steps: list[float]) -> dict:
    """What was seen in the laps of a [`Disturbance`], or of several one after the other, given the seconds of equal plain steps
    all along.

    `load_of_others` is the largest; `others_share` the part of all cores that other programs had; `step_ms` the median step in
    milliseconds, and `step_spread` by how much of it the middle half of the steps differ, and `step_drift` by how much the
    median of the last third is above that of the first; `trusted` tells whether nothing spoke against the times, and
    `disturbances` (`list[str]`) what did.
    """
    load, seconds = max(lap["load_of_others"] for lap in laps), sum(lap["seconds"] for lap in laps)
    share = max(0.0, sum(lap["others_share"] * lap["seconds"] for lap in laps) / seconds)
    low, middle, high = np.quantile(steps, [0.25, 0.5, 0.75]).tolist()
    spread = (high - low) / middle
    third = max(len(steps) // 3, 1)
    drift = float(np.median(steps[-third:]) / np.median(steps[:third]) - 1)
    found = reasons(load, share, spread, drift)
    seen = {"load_of_others": load, "others_share": share, "step_ms": 1000 * middle, "step_spread": spread}
    return seen | {"step_drift": drift, "trusted": not found, "disturbances": found}
