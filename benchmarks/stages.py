"""Commands in stages that share a time and can be killed: the frame of `benchmarks/gpu_run.py`."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
TICK = 0.5  # seconds between looks at the processes
LEAST = 10.0  # seconds of a stage for which nothing is left


class Run:
    """What is done, kept in run.json all the time, so that a kill loses next to nothing.

    Args:
        output: folder; it gets ``work`` for what is large, and ``result`` with run.json and the logs.
        minutes: of all stages together.
        shares: by stage, in their order: its part of what the earlier ones left.

    ``stages`` holds numbers by stage: "seconds", "done", and what `done` was told.
    """

    def __init__(self, output: Path, minutes: float, shares: dict[str, float]):
        self.work, self.result, self.minutes, self.shares = output / "work", output / "result", minutes, shares
        (self.result / "logs").mkdir(parents=True, exist_ok=True)
        self.work.mkdir(exist_ok=True)
        self.file = self.result / "run.json"
        self.record = json.loads(self.file.read_text()) if self.file.exists() else {"stages": {}}
        self.stages = self.record["stages"]

    def save(self) -> None:
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.record, indent=2) + "\n")
        os.replace(partial, self.file)

    def seconds_left(self, stage: str) -> float:
        """Of a stage, of whose time an earlier call may have spent some."""
        names = list(self.shares)
        before, rest = names[: names.index(stage)], names[names.index(stage) :]
        spent = {name: self.stages.get(name, {}).get("seconds", 0.0) for name in names}
        left = 60 * self.minutes - sum(spent[name] for name in before)
        return max(LEAST, left * self.shares[stage] / sum(self.shares[name] for name in rest) - spent[stage])

    def execute(self, stage: str, commands: dict[str, list], limit: float = math.inf, **environment: str) -> None:
        """Run Python on ``commands``, by name of their logs, side by side, and count the stage's seconds.

        After ``limit`` seconds they are interrupted, as by Ctrl-C, and may end as they like. Else SystemExit, with the
        end of the log, where one fails.
        """
        numbers = self.stages.setdefault(stage, {"seconds": 0.0})
        begun, before, children, interrupted = time.monotonic(), numbers["seconds"], {}, False
        path = [str(self.work / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        try:
            for name, command in commands.items():
                print(f"{stage}: {' '.join(map(str, command))}", flush=True)
                with (self.result / f"logs/{name}.log").open("a") as log:
                    options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": ROOT}
                    # In the background of a shell this process ignores Ctrl-C, and so would they.
                    options["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
                    line = [sys.executable, *map(str, command)]
                    children[name] = subprocess.Popen(line, env=os.environ | environment, **options)
            while any(child.poll() is None for child in children.values()):
                time.sleep(TICK)
                numbers["seconds"] = before + time.monotonic() - begun
                self.save()
                if not interrupted and time.monotonic() - begun > limit:
                    interrupted = True
                    for child in children.values():
                        child.send_signal(signal.SIGINT)
        finally:
            for child in children.values():
                if child.poll() is None:
                    child.terminate()  # every step can be killed and repeated
                    child.wait()
        for name, child in children.items():
            if child.returncode and not interrupted:
                log = self.result / f"logs/{name}.log"
                sys.exit(f"{log.read_text()[-3000:]}\nerror: {stage} ended with {child.returncode}, see {log}")

    def done(self, stage: str, **numbers) -> None:
        self.stages[stage] |= numbers | {"done": True}
        self.save()
        print(f"{stage}: {json.dumps(self.stages[stage])}", flush=True)

    def is_done(self, stage: str) -> bool:
        return self.stages.get(stage, {}).get("done", False)
