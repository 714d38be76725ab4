"""What a run of `train_peagle.py` finds in its output folder: another run, or a checkpoint to go on from."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import torch
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import SAFE_WEIGHTS_NAME

from arguments_peagle import PEagleArguments
from configuration_peagle import DrafterConfig
from modeling_peagle import Drafter


# In every checkpoint, the flags that it was made with. What the Trainer keeps of them is a pickle, which could run anything.
FLAGS = "flags.json"
# What a run goes on from, in any number of processes, spread over them (`optimizer.bin`) or not.
PARTS = (TRAINER_STATE_NAME, "config.json", FLAGS, SAFE_WEIGHTS_NAME, "optimizer*", "scheduler.pt", "rng_state*.pth")
# Beginnings of flags that no weight depends on while a run goes on (what `eval_fraction` changes shows in the data).
IDLE = (
    *("output_dir", "resume_from", "init_from", "yes", "target_hidden_dim", "max_minutes", "save_", "load_best_model"),
    *("metric_for_best_model", "greater_is_better", "eval_", "per_device_eval", "log", "disable_tqdm", "report_to"),
    *("run_name", "project", "trackio", "push_to_hub", "hub_", "local_rank", "ddp_timeout"),
)
# The optimizer's state brings these, whatever the flags say; or the state fits to no other.
OPTIMIZER = ("optim", "muon", "learning_rate", "weight_decay", "adam_", "use_lora", "lora_rank", "lora_target_modules")


@contextmanager
def held(args: PEagleArguments) -> Iterator[None]:
    """Keeps other runs out of `--output_dir`. The system lets go of it when a run ends, however it does.

    Raises:
        FileExistsError: One that is still running writes there, or without `--resume` what one made would be overwritten.
        OSError: The folder cannot be made.
    """
    lock, outcome = FileLock(os.path.join(args.output_dir, ".lock"), timeout=0), [None]
    if args.process_index == 0:  # the others have to learn of it
        try:
            os.makedirs(args.output_dir, exist_ok=True)
            lock.acquire()
            made = sort_checkpoints(args.output_dir) or os.path.isfile(os.path.join(args.output_dir, "config.json"))
            if made and not args.resume_from_checkpoint:
                raise FileExistsError(
                    f"{args.output_dir} holds a drafter: go on with --resume, or name another --output_dir."
                )
        except Timeout:
            outcome = [
                FileExistsError(f"Another run writes to {args.output_dir}: wait for it, or name another --output_dir.")
            ]
        except OSError as error:
            outcome = [error]
    try:
        (error,) = broadcast_object_list(outcome)
        if error is not None:
            raise error
        yield
    finally:
        lock.release()


def flags_of(args: PEagleArguments) -> dict:
    """The flags as JSON has them, what is learned, and what else decides how sums are rounded."""
    flags = json.loads(args.to_json_string()) | {"data": args.data_digest, "processes": args.world_size}
    return flags | {"threads": torch.get_num_threads()} if args.device.type == "cpu" else flags


def save_flags(args: PEagleArguments, checkpoint: str):
    with open(os.path.join(checkpoint, FLAGS), "w") as file:
        json.dump(flags_of(args), file, indent=2)


def fault_of(checkpoint: str) -> str | None:
    """What keeps a run from going on from a checkpoint, in words; None if it is whole.

    The Trainer writes its own state last, so of a run that was killed while it saved that is what is missing.
    """
    for part in PARTS:
        files = sorted(file for file in Path(checkpoint).glob(part))
        if not files:
            return f"{part.replace('*', '')} is missing"
        for file in filter(Path.is_file, files):
            try:
                if file.suffix == ".json":
                    json.loads(file.read_text())
                elif file.suffix == ".safetensors":
                    safe_open(file, "pt")
                elif ZipFile(file).testzip() is not None:  # what torch.save writes
                    raise BadZipFile
            except (OSError, ValueError, SafetensorError, BadZipFile):
                return f"{file.name} is damaged"
    return None


def state_of(checkpoint: str) -> TrainerState:
    return TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))


def checkpoint_to_resume(args: PEagleArguments, config: DrafterConfig) -> str | None:
    """The checkpoint that `--resume` names, `true` for the last whole one of `--output_dir`; None without it.

    Raises:
        ValueError: There is none, or it holds a drafter of another shape, of which parts would start anew unnoticed.
    """
    path, there = args.resume_from_checkpoint, sort_checkpoints(args.output_dir)
    if not path:
        return None
    named, passed = str(path).lower() != "true", []
    candidates = [path] if named else reversed(there)
    for path in candidates:
        fault = fault_of(path)
        if fault is None:
            break
        passed.append(f"{path} is not whole ({fault})")
    else:
        where = path if named else args.output_dir
        raise ValueError(f"--resume: there is no whole checkpoint in {where}{': ' * bool(passed)}{'; '.join(passed)}.")
    if passed and args.process_index == 0:
        print(f"{'; '.join(passed)}; going on with {path}")
    saved, ours = type(config).from_pretrained(path).to_dict(), config.to_dict()
    unshaped = ("architectures", "dtype", "transformers_version", "use_cache", "_name_or_path")
    differ = [key for key in ours if key not in unshaped and saved.get(key) != ours[key]]
    if differ:
        words = ", ".join(f"{key} {saved.get(key)} there and {ours[key]} here" for key in sorted(differ))
        raise ValueError(f"--resume: the drafter in {path} is another one: {words}. Use the same flags.")
    return path


def check_draft_vocabulary(checkpoint: str, drafter: Drafter):
    """Refuse to go on with a drafter of other draft tokens: the head's rows and the labels would not belong together."""
    if drafter.config.draft_vocab_size < drafter.config.vocab_size:
        with safe_open(os.path.join(checkpoint, SAFE_WEIGHTS_NAME), "pt") as file:
            if not torch.equal(file.get_tensor("d2t"), drafter.d2t.cpu()):
                raise ValueError(
                    f"--resume: the draft vocabulary of {checkpoint} is not that of this data, whose most frequent tokens are "
                    "others. Go on with the data, --eval_fraction and --max_seq_len that the run began with."
                )


def check_flags(checkpoint: str, args: PEagleArguments):
    """Say which flags are others than those that a checkpoint was made with, as the weights will be others too then.

    Raises:
        ValueError: One of them would change nothing, as the optimizer's state brings its own, or cannot change; or the data
            are others, in which the place where the run was means nothing.
    """
    saved, ours = json.loads(Path(checkpoint, FLAGS).read_text()), flags_of(args)
    anew = f"begin anew from its weights: --init_from_drafter {checkpoint} and another --output_dir"
    if saved.get("data") != ours["data"]:
        raise ValueError(
            f"--resume: {checkpoint} was in the midst of other data than these. Go on with those, with the --eval_fraction and "
            f"--max_seq_len of then, or {anew}."
        )
    differ = {
        key: f"{key} {saved.get(key)} there and {ours.get(key)} here"
        for key in sorted(saved | ours)
        if saved.get(key) != ours.get(key) and not key.startswith(IDLE)
    }
    fixed = [words for key, words in differ.items() if key.startswith(OPTIMIZER)]
    if fixed:
        raise ValueError(
            f"--resume: the optimizer of {checkpoint} cannot go on with other flags: {', '.join(fixed)}. Use the same"
            f"{'' if args.use_lora else f', or {anew}'}."
        )
    if differ and args.process_index == 0:
        print(f"not bit for bit the run that made {checkpoint}: {', '.join(differ.values())}")
