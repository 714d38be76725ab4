"""Packed blocks to feature shards: `python -m data.extract_features --model_path target --input blocks --output features`.

The frozen target reads every block once; what it says, which is all that training a drafter needs of it, is kept in the
format of `data.feature_shards`. Shards appear under their names only when they are whole. A run that was killed or ran out
of disk is simply run again: it keeps the whole shards, redoes the rest, and refuses a folder made with other settings.
`accelerate launch -m data.extract_features ...` shares the shards among its processes.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from huggingface_hub import try_to_load_from_cache
from tqdm.auto import tqdm
from transformers.utils import is_flash_attn_2_available

from data.collator import packed_row
from data.feature_plan import DTYPES, FeaturePlan, Shard, parse_size
from data.feature_shards import write_shard
from data.hub import add_hub_arguments, publish
from data.sequence_packing import load_blocks
from data.target_signals import check_isolation, target_signals, to_device
from target_peagle import load_target


def process_state() -> PartialState:
    """This process among those that were launched together."""
    # Processes without accelerators find each other only if told so. They wait long: one checks the shards that are
    # there already, and any may be done early.
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=30))


class SignalReader:
    """The target, asked for the blocks of a plan."""

    def __init__(self, target, plan: FeaturePlan, batch_size: int):
        self.target, self.plan, self.batch_size = target, plan, batch_size

    def blocks(self, split: str, numbers: range) -> list[dict]:
        side = self.plan.blocks[split]
        return [side[number] for number in numbers]

    def read(self, split: str, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (tokens, layers * hidden_size) and last hidden states (tokens, hidden_size) of a few blocks.

        In the dtype of the plan, on the target's device. Raises ValueError where they are not finite in it.
        """
        row = to_device(packed_row(self.blocks(split, numbers)), self.target.device)
        signals = [signal[0].to(self.plan.dtype) for signal in target_signals(self.target, row, self.plan.layer_ids)]
        if not all(signal.isfinite().all() for signal in signals):
            raise ValueError(
                f"{split} blocks {numbers.start} to {numbers.stop - 1}: the target's states are not finite in "
                f"{self.plan.dtype}: use bfloat16 or float32 for --dtype, or the target in another precision"
            )
        return tuple(signals)

    def speed(self, shard: Shard) -> float:
        """Tokens per second, from the first blocks of a shard."""
        started = time.perf_counter()
        features, _ = self.read(shard.split, shard.blocks[: self.batch_size])
        return len(features) / (time.perf_counter() - started)

    def make(self, shard: Shard, bar: tqdm) -> dict[str, torch.Tensor]:
        """The tensors of one shard, on the CPU."""
        width, dtype = self.plan.width, self.plan.dtype
        features = torch.empty(shard.tokens, len(self.plan.layer_ids) * width, dtype=dtype)
        last_hidden, done = torch.empty(shard.tokens, width, dtype=dtype), 0
        for first in range(0, len(shard.blocks), self.batch_size):
            signals = self.read(shard.split, shard.blocks[first : first + self.batch_size])
            end = done + len(signals[0])
            features[done:end], last_hidden[done:end] = signals
            bar.update(end - done)
            done = end
        blocks = self.blocks(shard.split, shard.blocks)
        row = packed_row(blocks)
        lengths = torch.tensor([0, *(len(block["input_ids"]) for block in blocks)])
        return {
            "features": features,
            "last_hidden": last_hidden,
            "input_ids": row["input_ids"][0].int(),
            "position_ids": row["position_ids"][0].int(),
            "loss_mask": torch.cat([torch.as_tensor(block["loss_mask"], dtype=torch.int8) for block in blocks]),
            "cu_seqlens": row["cu_seq_lens_q"],
            "block_offsets": lengths.cumsum(0).int(),
        }

    def write(self, shard: Shard, tensors: dict[str, torch.Tensor]) -> None:
        counts = {"blocks": len(shard.blocks), "tokens": shard.tokens, "supervised": int(tensors["loss_mask"].sum())}
        write_shard(self.plan.output / shard.name, tensors, self.plan.notes(shard) | counts)

    def make_all(self, shards: list[Shard], progress: bool) -> None:
        """Fill one shard while the one before is hashed and written."""
        tokens = sum(shard.tokens for shard in shards)
        with (
            tqdm(total=tokens, desc="extracting", unit=" tokens", unit_scale=True, disable=not progress) as bar,
            ThreadPoolExecutor(1) as writer,
        ):
            written = None
            for shard in shards:
                tensors = self.make(shard, bar)
                if written is not None:
                    written.result()  # raises what went wrong
                written = writer.submit(self.write, shard, tensors)
                del tensors  # or a third shard would be in memory
            if written is not None:
                written.result()


def prepare(reader: SignalReader, max_disk: int, processes: int, progress: bool) -> list[Shard]:
    """All that is decided before the target reads: the shards to make, or an error that says why there will be none."""
    plan = reader.plan
    missing = plan.open(progress)
    if not missing:
        return []
    plan.check_disk(missing, max_disk, progress)
    plan.start(missing)
    check_isolation(reader.target, plan.layer_ids)
    speed = reader.speed(missing[0])
    minutes = sum(shard.tokens for shard in missing) / speed / processes / 60
    if progress:
        print(f"about {minutes:,.1f} minutes, at {speed:,.0f} tokens/s in each of {processes} process(es)")
    return missing


def extract_features(
    target,
    tokenizer,
    input_folder,
    output,
    *,
    layer_ids: list[int] | None = None,
    dtype: str = "bfloat16",
    shard_size: int = 10**9,
    max_disk: int = 50 * 10**9,
    batch_size: int = 1,
    revision: str | None = None,
    progress: bool = True,
) -> dict:
    """Let the target read the packed blocks of ``input_folder`` and write its signals to the folder ``output``.

    ``target``: a causal language model in eval mode, and its tokenizer, the one the blocks were made with. ``layer_ids``:
    see `default_layer_ids`, which is the default. ``dtype``: of the stored states, a key of DTYPES. ``shard_size``: bytes
    of a file, at most; two of them are held in memory, one being filled while the other is written. ``max_disk``: bytes of
    all files, at most. ``batch_size``: blocks per forward, in one row; pays with flash attention only, as others take time
    and memory with the square of the row. ``revision``: the target's commit, for the manifest. ``progress``: show sizes,
    an estimate of the time, and a bar. In a distributed run every process calls this.

    Returns the manifest, whose counts per split are those of the blocks' manifest; to the other processes, its settings.

    Raises ValueError: an argument is out of range; the tokenizer or, in ``output``, a setting is another one; the target
    mixes documents; its states are not finite in ``dtype``. OSError: the features would take more than ``max_disk`` or the
    free space, or reading or writing failed. FileExistsError: ``output`` holds something else, or another run writes there.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: it counts blocks, at least 1")
    state = process_state()
    progress = progress and state.is_main_process
    plan = FeaturePlan(target, tokenizer, input_folder, output, layer_ids, dtype, shard_size, revision)
    reader = SignalReader(target, plan, batch_size)
    lock, outcome = FileLock(plan.output / ".lock", timeout=0), [None]
    if state.is_main_process:  # whatever it decides, an error too, the others have to learn
        try:
            plan.output.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            outcome = [prepare(reader, max_disk, state.num_processes, progress)]
        except Timeout:
            outcome = [FileExistsError(f"another run writes to {plan.output}: wait for it, or name another output")]
        except (OSError, ValueError) as error:
            outcome = [error]
    try:
        (missing,) = broadcast_object_list(outcome)
        if isinstance(missing, Exception):
            raise missing
        reader.make_all(missing[state.process_index :: state.num_processes], progress)
        state.wait_for_everyone()
        if not state.is_main_process:
            return plan.settings
        manifest = plan.finish()
        if progress:
            for split in plan.blocks:
                print(f"{split}:", ", ".join(f"{name} {count:,}" for name, count in manifest[split].items()))
        return manifest
    finally:
        lock.release()


def load_for_extraction(name: str | None, revision: str | None, attn_implementation: str | None, device) -> tuple:
    """The target, its tokenizer and its commit, None where it is no Hub id.

    Flash attention is taken unasked where CUDA, the package and a dtype that it knows are there.
    """
    attention = attn_implementation or "sdpa"
    target, tokenizer = load_target(name, revision=revision, attn_implementation=attention, device=device)
    flash = target.device.type == "cuda" and target.dtype.itemsize == 2 and is_flash_attn_2_available()
    if attn_implementation is None and flash:
        target.set_attn_implementation("flash_attention_2")
    commit = None
    if name is not None and not os.path.isdir(os.path.expanduser(name)):
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        commit = Path(cached).parent.name if isinstance(cached, str) else revision
    return target, tokenizer, commit


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.extract_features", description="Packed blocks to the target's signals, in shards."
    )
    parser.add_argument("--model_path", help="the target: folder or Hub id (SmolLM2-135M-Instruct)")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--input", required=True, help="blocks, made by python -m data.sequence_packing")
    parser.add_argument(
        "--output", required=True, help="folder for the shards; run again to go on after an interruption"
    )
    parser.add_argument(
        "--layer_ids", type=int, nargs="+", help="hidden states to keep (a low, a middle and a high one)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the stored states (%(default)s)")
    parser.add_argument("--shard_size", type=parse_size, default="1GB", help="size of a file, at most (%(default)s)")
    parser.add_argument("--max_disk", type=parse_size, default="50GB", help="size of all files, at most (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=1, help="blocks per forward (%(default)s)")
    parser.add_argument("--attn_implementation", help="flash_attention_2 where it can run, else sdpa")
    add_hub_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        load_blocks(args.input)  # a wrong folder is named before the target's weights are loaded
        device = process_state().device
        target, tokenizer, commit = load_for_extraction(
            args.model_path, args.revision, args.attn_implementation, device
        )
        options = ("layer_ids", "dtype", "shard_size", "max_disk", "batch_size")
        manifest = extract_features(
            target,
            tokenizer,
            args.input,
            args.output,
            revision=commit,
            **{name: getattr(args, name) for name in options},
        )
        if args.push_to_hub and process_state().is_main_process:
            print("published:", publish("features", args.output, args.push_to_hub, manifest, args))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
