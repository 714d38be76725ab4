"""The whole recipe on one GPU without network, in one run: `python benchmarks/gpu_run.py --output out [options] [-- options of train_peagle.py]`.

Self-prompted chats, prompts of many kinds made of them, answers to these, blocks, training with the target online, and the
evaluation. The minutes of ``--minutes`` are split over the stages; one that needs less leaves the rest to those after
it, and writing and training end when theirs are over, with what they have. Killed, the same command goes on where it was.

    out/work     chats, blocks, checkpoints: gigabytes
    out/result   drafter, reports, logs, some chats, and run.json: seconds and tokens of every stage
    out/carry    out/result as one archive in parts of 15 MB: python benchmarks/parts.py join out/carry FOLDER

What the machine lacks is carried there. `python benchmarks/gpu_run.py pack --output parts [--wheels FOLDER] --size 15M` makes
parts of the embedded target's file and of wheels; with ``--model_parts parts`` they are checked, joined and installed.

NOT MEASURED, estimates for SmolLM2-135M, 12 million written tokens and 30 million trained ones (2.5 passes) on an H100 or
H200, whose matrices run at some 400 (bfloat16) and 45 TFLOP/s (float32) in practice:

    writing    2 x 135M FLOPs a token and as much for every second one that is only read: 5e15, 15 s of the GPU. Python and
               launches decide: some 30 ms a forward in 8 processes of 96 rows, 10,000 to 20,000 tokens/s, 10 to 20 minutes.
               (Several small batches, as without flash attention a batch's attention grows with its square.)
    packing    no FLOPs to speak of; 1 to 2 minutes of one core for 40,000 chats.
    training   2 x 106M of the target in float32 and 6 x 9M of the drafter in each of 2.2 slots: 3.4e8 FLOPs a token, 1e16
               in all, 2.5 minutes of the target and 15 s of the drafter; with launches, some 6 minutes.
    evaluation 26 prompts of 128 tokens, three ways, plain and drafted: 2 to 4 minutes, all of it launches.
"""

import argparse
import json
import shutil
import signal
import sys
import tarfile
from itertools import islice
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import check_packages, install, pack, wanted_packages  # noqa: E402
from benchmarks.parts import bytes_of, split_file  # noqa: E402
from benchmarks.stages import ROOT, Run  # noqa: E402


# The share of the time that each stage may take of what is left for it and those after it; the check takes what it needs.
SHARES = {"check": 0.0, "self": 0.2, "prompts": 0.02, "sets": 0.32, "pack": 0.06, "train": 0.26, "evaluate": 0.14}
TRAINED = 0.7  # of the training's time; the rest is for its start, its evaluations and what is between steps
WAYS = {"chain": (), "tree": ("--draft_tree", "15"), "auto": ("--draft_tree", "auto")}
# On a GPU the target's attention sees a whole batch, so two blocks are enough; for more, gradients are accumulated.
FULL = {
    "minutes": 24,
    "writers": 8,
    "disk": 8,  # GB
    "self": ["--num_conversations", "20000"],  # of each writer; more than the time allows
    "prompts": ["--num_prompts", "6000"],  # of each writer; there are not many more for a seed
    "write": ["--max_new_tokens", "512", "--batch_size", "96", "--max_length", "2048", "--dtype", "bfloat16"],
    "pack": ["--max_seq_len", "2048", "--eval_fraction", "0.02"],
    "train": ["--batch_size", "2", "--num_epochs", "3", "--bf16", "true", "--eval_prompts", "16"],
    "evaluate": ["--per_category", "2", "--max_new_tokens", "128"],
}
SMOKE = {
    "minutes": 20,  # so that the counts decide
    "writers": 1,
    "disk": 1,
    "self": ["--num_conversations", "4"],
    "prompts": ["--num_prompts", "6"],
    "write": ["--max_new_tokens", "96", "--batch_size", "4", "--max_length", "1024"],
    "pack": ["--max_seq_len", "256", "--eval_fraction", "0.1"],
    "train": ["--num_epochs", "0.4", "--use_cpu", "true", "--save_every", "0.5", "--draft_vocab_size", "1024"]
    + ["--eval_prompts", "1", "--eval_new_tokens", "4"],
    "evaluate": ["--num_prompts", "1", "--max_new_tokens", "8"],
}
RECIPE = "--markov_rank 64 --depth_weights survival --muon --learning_rate 2e-3".split()
GIB_A_WRITER = 8  # weights, cache, mask and scores, and CUDA's own


def check(args, scale: dict, run: Run) -> int:
    """How many writers there is room for. Raises ValueError for what would end the run later."""
    if args.model_parts:
        install(args.model_parts, run)
    versions = check_packages(wanted_packages(), args.other_versions)
    free = shutil.disk_usage(run.work).free / 1e9
    if free < scale["disk"]:
        raise ValueError(f"{run.work} has {free:.1f} GB free, and {scale['disk']} are needed: name another --output")
    for prompts in filter(None, (args.prompts, args.chats)):
        if not prompts.is_file():
            raise ValueError(f"there is no file {prompts}")
    import torch  # only now is it known to be there

    writers, gpu = args.writers or scale["writers"], None
    if not args.smoke:
        if not torch.cuda.is_available():
            raise ValueError("there is no GPU that torch sees: use --smoke for a look on a CPU")
        properties = torch.cuda.get_device_properties(0)
        gib = properties.total_memory / 2**30
        writers, gpu = min(writers, int(gib // GIB_A_WRITER)), f"{properties.name}, {gib:.0f} GiB"
    if not writers:
        raise ValueError(f"{gpu} is too small: a writer takes up to {GIB_A_WRITER} GiB")
    # The embedded target is converted once, which takes half a minute; a target that is not there is told.
    if not run.is_done("check"):
        code = f"from target_peagle import load_target; load_target({args.target!r}, device='cpu')"
        run.execute("check", {"target": ["-c", code]})
    run.done("check", versions=versions, gpu=gpu, writers=writers, minutes=run.minutes)
    return writers


def target_as(flag: str, args) -> list[str]:
    return [flag, args.target] if args.target else []


def rows_of(files: list[Path]):
    for file in files:
        with file.open() as lines:
            yield from lines


def write(run: Run, args, scale: dict, stage: str, writers: int, inputs) -> list[Path]:
    """One stage of chats, a file for each writer, with its index as the seed; ``inputs`` gives the options of each."""
    files = [run.work / f"{stage}-{index}.jsonl" for index in range(writers)]
    if not run.is_done(stage):
        minutes = run.seconds_left(stage) / 60
        common = [*scale["write"], "--max_minutes", f"{minutes:.3f}", *target_as("--target_model", args)]
        commands = {
            file.stem: ["-m", "data.generate_data", "--output", file, "--seed", index, *inputs(index), *common]
            for index, file in enumerate(files)
        }
        run.execute(stage, commands, **({"OMP_NUM_THREADS": "1"} if writers > 1 else {}))
        # What the target wrote of single answers; with the user's turns and later answers it is more.
        tokens = sum(len(json.loads(row).get("resp_ids", ())) for row in rows_of(files))
        run.done(stage, chats=sum(1 for _ in rows_of(files)), answer_tokens=tokens)
    return files


def train(run: Run, args, scale: dict, blocks: Path, drafter: Path) -> None:
    checkpoints = list(drafter.glob("checkpoint-*/trainer_state.json"))  # written last
    if not checkpoints:
        shutil.rmtree(drafter, ignore_errors=True)
    command = ["train_peagle.py", "--train_dir", blocks, "--output_dir", drafter, "--save_every", "0.2", "--yes"]
    command += ["--max_minutes", f"{TRAINED * run.seconds_left('train') / 60:.3f}", *RECIPE, *scale["train"]]
    command += target_as("--target_model", args) + ["--resume"] * bool(checkpoints) + args.train
    run.execute("train", {"train": command})
    states = [json.loads(file.read_text()) for file in drafter.glob("checkpoint-*/trainer_state.json")]
    state = max(states, key=lambda state: state["global_step"])
    run.done("train", steps=state["max_steps"], tokens=state["num_input_tokens_seen"], best_tau=state["best_metric"])


def evaluate(run: Run, args, scale: dict, drafter: Path) -> None:
    reports = {way: run.result / f"report_{way}.json" for way in WAYS}
    for number, (way, options) in enumerate(WAYS.items()):
        if not written(reports[way]):
            command = [
                "evaluate_peagle.py",
                "--drafter",
                drafter,
                "--quiet",
                "true",
                "--output",
                reports[way],
                *options,
            ]
            command += [*scale["evaluate"], "--prompts", args.prompts, *target_as("--target", args)]
            limit = run.seconds_left("evaluate") / (len(WAYS) - number)
            try:  # interrupted, it reports on the prompts that it has answered
                run.execute("evaluate", {f"evaluate_{way}": command}, limit)
            except SystemExit:  # where answers differ from plain ones it fails, but not without a report
                if not written(reports[way]):
                    raise
    if missing := [way for way, report in reports.items() if not written(report)]:
        raise ValueError(f"no time was left to evaluate {', '.join(missing)}: repeat the command with more --minutes")
    found = {way: json.loads(report.read_text()) for way, report in reports.items()}
    broken = [way for way, report in found.items() if report["promise_broken"]]
    run.done("evaluate", tau={way: report["total"]["tau"] for way, report in found.items()}, promise_broken=broken)


def written(report: Path) -> bool:
    return report.exists() and report.stat().st_size > 0


def collect(run: Run, drafter: Path, chats: list[Path]) -> None:
    """The drafter and some of the chats to the results, and all of these into parts."""
    checkpoints = shutil.ignore_patterns("checkpoint-*")
    shutil.copytree(drafter, run.result / "drafter", ignore=checkpoints, dirs_exist_ok=True)
    with (run.result / "chats_sample.jsonl").open("w") as sample:
        sample.writelines(row for file in chats for row in islice(rows_of([file]), 20))
    carry, archive = run.result.with_name("carry"), run.work / "result.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(run.result, "result")
    shutil.rmtree(carry, ignore_errors=True)
    parts = split_file(archive, carry, bytes_of("15M"))
    print(f"{run.result}: {archive.stat().st_size / 1e6:.1f} MB packed, in {len(parts)} part(s) in {carry}")


def path(name: str) -> Path:
    """Absolute, as the stages run in the repository's root."""
    return Path(name).resolve()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", nargs="?", choices=("run", "pack"), default="run", help="run it all, or pack what is carried")
    add("--output", type=path, required=True, help="folder of all that is made; `pack`: of the parts")
    add("--minutes", type=float, help="of all stages together (24, or 20 with --smoke)")
    add("--smoke", action="store_true", help="the same stages with tiny counts, on a CPU")
    add("--prompts", type=path, default=ROOT / "data/prompts.jsonl", help="JSON Lines to evaluate on")
    add("--chats", type=path, help="JSON Lines: further chats of the target to train on")
    add("--target", help="folder or Hub id; the embedded SmolLM2-135M-Instruct if unset")
    add("--writers", type=int, help="processes that write chats (as many as the memory has room for, up to 8)")
    add("--model_parts", type=path, help="folder of what `pack` made: it is checked, joined and installed")
    add("--other_versions", action="store_true", help="take other versions of packages than requirements.txt names")
    add("--wheels", type=path, help="`pack`: folder of wheels to carry too")
    add("--size", type=bytes_of, default="15M", help="`pack`: of a part at most (%(default)s)")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:end])
    args.train = arguments[end + 1 :]
    if args.target and Path(args.target).is_dir():
        args.target = str(path(args.target))
    return args


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    try:
        if args.command == "pack":
            return pack(args.output, args.wheels, args.size)
        scale = SMOKE if args.smoke else FULL
        run = Run(args.output, args.minutes or scale["minutes"], SHARES)
        writers = check(args, scale, run)
        chats = write(run, args, scale, "self", writers, lambda index: scale["self"])
        prompts = [run.work / f"prompts-{index}.jsonl" for index in range(writers)]
        if not run.is_done("prompts"):
            line = ["-m", "data.prompt_sets", *scale["prompts"], "--output"]
            made = enumerate(zip(prompts, chats))
            run.execute("prompts", {p.stem: [*line, p, "--chats", c, "--seed", index] for index, (p, c) in made})
            run.done("prompts", prompts=sum(1 for _ in rows_of(prompts)))
        chats += write(run, args, scale, "sets", writers, lambda index: ["--prompts", prompts[index]])
        blocks, drafter = run.work / "blocks", run.work / "drafter"
        if not run.is_done("pack"):
            together = run.work / "chats.jsonl"
            with together.open("w") as file:
                file.writelines(rows_of([*chats, *filter(None, [args.chats])]))
            line = ["-m", "data.sequence_packing", "--input", together, "--output", blocks, *scale["pack"]]
            run.execute("pack", {"pack": [*line, *target_as("--tokenizer", args)]})
            made = json.loads((blocks / "manifest.json").read_text())
            run.done("pack", **{side: made[side] for side in ("train", "eval")})
        if not run.is_done("train"):
            train(run, args, scale, blocks, drafter)
        try:
            if not run.is_done("evaluate"):
                evaluate(run, args, scale, drafter)
        finally:  # a drafter that is there is brought back
            collect(run, drafter, chats)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: the same command goes on")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit's kill ends the children, too
    main(sys.argv[1:])
