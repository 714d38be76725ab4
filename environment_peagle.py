"""What a measurement was made on, and whether other programs disturb it."""

import platform
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
import transformers


ROOT = Path(__file__).resolve().parent


def command_line() -> str:
    """The command that this process was started with, for reports: those are shared, the machine's folders are not."""
    return shlex.join(["python", *sys.argv]).replace(f"{ROOT}/", "")


def environment(target) -> dict:
    """Versions, machine and models; `load_of_others` is what other programs have asked of late, in cores."""
    # Where there is no such file, or it names no model, Python's own word has to do.
    cpu = re.findall(r"model name\s*: (.+)", "".join(file.read_text() for file in Path("/proc").glob("cpuinfo")))
    git = subprocess.run("git describe --always --dirty", shell=True, cwd=ROOT, capture_output=True, text=True)
    # A second of our own CPU time within the last minute adds about 1/60 to the one-minute load average.
    own, cores = min(time.process_time() / 60, torch.get_num_threads()), psutil.cpu_count()
    others = max(0.0, psutil.getloadavg()[0] - own)
    warning = f"WARNING: other programs keep {others:.1f} of {cores} cores busy, do not trust the timings."
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "git": git.stdout.strip() or None,
        "cpu": cpu[0] if cpu else platform.processor(),
        "gpu": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "cores": cores,
        "load_of_others": others,
        "load_warning": warning if others > 0.5 * cores else None,
        "dtype": str(target.dtype).removeprefix("torch."),
    }
