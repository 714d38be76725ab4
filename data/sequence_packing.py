"""A conversation file to packed training blocks: `python -m data.sequence_packing --input chats.jsonl --output blocks`.

Conversations are encoded, de-duplicated and split into train and eval; then those that are too long are cut into windows
(`data.windows`), and the windows of each side are packed into blocks of at most ``max_seq_len`` tokens.

The output folder is laid out as a data set of the Hub: ``data/train-00000-of-00002.parquet``, ``data/eval-...`` and
``manifest.json``. Parquet, because shards can be written one by one, which bounds what is held in memory, and are what the Hub
stores; a third of the size of Arrow files. `load_blocks` reads the folder. It is written beside its final place under a
name with ``.partial-`` in it and renamed once the manifest is in it, so a folder of the final name is always whole. A
killed run is simply run again (its ``.partial-`` folder may be deleted); a run never touches an output that is there.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    List,
    Value,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    load_dataset,
)
from tqdm.auto import tqdm
from transformers import AutoTokenizer, GenerationConfig
from trl import pack_dataset

from configuration_peagle import tokenizer_fingerprint
from data.conversations import (
    BadConversation,
    check_masks,
    encode_conversation,
    is_eval,
    read_jsonl,
    show_supervision,
)
from data.windows import split_conversation


BLOCKS = Features(
    {"input_ids": List(Value("int32")), "loss_mask": List(Value("int8")), "seq_lengths": List(Value("int32"))}
)
# Packed at a time. More would fill no better (the last few of a shard stay open), and 1024 blocks of 4096 tokens take
# 190 MB of memory while they are packed, beside the 460 MB of the imports.
SHARD_BLOCKS = 1024
MANIFEST = "manifest.json"


def pack_windows(windows: list[dict[str, np.ndarray]], max_seq_len: int) -> Dataset:
    """Windows (``input_ids`` and ``loss_mask``, arrays of shape (tokens,)) to blocks with the columns of BLOCKS.

    Best-fit decreasing; ``seq_lengths`` of a block holds the lengths of its windows in their order.
    Raises ValueError where a window is longer than ``max_seq_len``, as packing would cut it.
    """
    lengths = [len(window["input_ids"]) for window in windows]
    if max(lengths) > max_seq_len:
        raise ValueError(f"a window of {max(lengths)} tokens does not fit into blocks of {max_seq_len}: cut it first")
    # Built by hand, as Dataset.from_dict takes longer over arrays than the tokenizer over their text.
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    columns = {name: np.concatenate([window[name] for window in windows]) for name in ("input_ids", "loss_mask")}
    table = pa.table({name: pa.ListArray.from_arrays(offsets, pa.array(column)) for name, column in columns.items()})
    return pack_dataset(Dataset(table), max_seq_len, "bfd", {"batch_size": None})


class _Side:
    """One split on its way to the disk: windows are gathered until they fill a shard, then packed and written."""

    def __init__(self, name: str, folder: Path, max_seq_len: int):
        self.name, self.folder, self.max_seq_len = name, folder, max_seq_len
        self.waiting, self.waiting_tokens = [], 0
        self.counts = Counter(shards=0, blocks=0, windows=0, windows_without_supervision=0, tokens=0, supervised=0)

    def add(self, windows: list[dict[str, np.ndarray]]) -> None:
        """Take all windows of one conversation."""
        self.waiting += windows
        self.waiting_tokens += sum(len(window["input_ids"]) for window in windows)
        if self.waiting_tokens >= SHARD_BLOCKS * self.max_seq_len:
            self.write()

    def write(self) -> None:
        if not self.waiting:
            return
        blocks = pack_windows(self.waiting, self.max_seq_len)
        blocks.to_parquet(self.folder / f"{self.name}-{self.counts['shards']:05}.parquet")
        supervised = [int(window["loss_mask"].sum()) for window in self.waiting]
        self.counts.update(
            shards=1,
            blocks=len(blocks),
            windows=len(self.waiting),
            windows_without_supervision=supervised.count(0),
            tokens=self.waiting_tokens,
            supervised=sum(supervised),
        )
        self.waiting, self.waiting_tokens = [], 0

    def close(self) -> dict:
        """Write the rest, give the shards their final names and return the counts."""
        self.write()
        names = _shard_names(self.name, self.counts["shards"])
        for index, name in enumerate(names):
            os.rename(self.folder / f"{self.name}-{index:05}.parquet", self.folder / name)
        capacity = self.counts["blocks"] * self.max_seq_len
        return {**self.counts, "fill": self.counts["tokens"] / capacity if capacity else None}


def _shard_names(side: str, shards: int) -> list[str]:
    return [f"{side}-{index:05}-of-{shards:05}.parquet" for index in range(shards)]


def _template_hash(tokenizer) -> str:
    """SHA-256 of the chat template or, where there are several, of all of them under their names."""
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()


def pack_conversations(
    input_file,
    output,
    tokenizer,
    *,
    max_seq_len: int,
    eval_fraction: float = 0.05,
    stop_token_ids: Collection[int] = (),
    progress: bool = True,
) -> dict:
    """Encode, de-duplicate, split, cut and pack a JSON Lines file of conversations into the folder ``output``.

    ``tokenizer``: a fast one with a chat template. ``max_seq_len``: tokens per block, at least 8. ``eval_fraction``: the
    share of the conversations that goes to eval, by their own text, so that no conversation is on both sides and none
    changes sides when rows are added. ``stop_token_ids``: as for `encode_conversation`. ``progress``: show a bar, then
    the counts and one window with its supervised tokens in brackets.

    Returns the manifest. Its "conversations" counts "read" = "train" + "eval" + all "skipped: <reason>"; "cut into
    windows" counts among the kept. Memory does not grow with the file, but for 100 bytes per conversation, by which
    duplicates are known.

    Raises ValueError: an argument is out of range, the tokenizer is unfit, all masks are zero or one, or nothing is
    left to train on. FileExistsError: there is something in ``output``. OSError: reading or writing failed. After any
    of these there is no output.
    """
    input_file, output = Path(input_file), Path(output)
    if max_seq_len < 8 or not 0 <= eval_fraction <= 1:
        raise ValueError(f"need max_seq_len >= 8 and 0 <= eval_fraction <= 1, got {max_seq_len} and {eval_fraction}")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} is there already: delete it, or name another output")
    with input_file.open("rb") as file:
        source = {"name": input_file.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    output.parent.mkdir(parents=True, exist_ok=True)
    quiet = are_progress_bars_disabled()
    disable_progress_bars()  # datasets would show several for each shard
    try:
        with tempfile.TemporaryDirectory(prefix=f"{output.name}.partial-", dir=output.parent) as partial:
            folder = Path(partial, "blocks")  # the temporary folder itself is for the owner's eyes only
            (folder / "data").mkdir(parents=True)
            sides = {name: _Side(name, folder / "data", max_seq_len) for name in ("train", "eval")}
            report, sample = _fill(sides, input_file, tokenizer, max_seq_len, eval_fraction, stop_token_ids, progress)
            manifest = {
                "max_seq_len": max_seq_len,
                "eval_fraction": eval_fraction,
                "input": source,
                "tokenizer": tokenizer.name_or_path,
                "tokenizer_hash": tokenizer_fingerprint(tokenizer),
                "chat_template_hash": _template_hash(tokenizer),
                "stop_token_ids": sorted(stop_token_ids),
                "conversations": dict(report),
                **{name: side.close() for name, side in sides.items()},
                "versions": {"python": platform.python_version()}
                | {name: version(name) for name in ("transformers", "tokenizers", "datasets", "trl")},
            }
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            os.rename(folder, output)
    finally:
        if not quiet:
            enable_progress_bars()
    if progress:
        for name in sides:
            print(
                f"{name}:", ", ".join(f"{key} {value:,}" for key, value in manifest[name].items() if value is not None)
            )
        print("a sample, supervised tokens in brackets:", show_supervision(**sample, tokenizer=tokenizer), sep="\n")
    return manifest


def _fill(sides, input_file, tokenizer, max_seq_len, eval_fraction, stop_token_ids, progress) -> tuple[Counter, dict]:
    """Bring every conversation of the file into its side. Returns the counts and the first supervised window."""
    report, first, seen, sample = Counter(), {}, set(), None
    for number, row in tqdm(read_jsonl(input_file), desc="conversations", unit=" rows", disable=not progress):
        report["read"] += 1
        try:
            if isinstance(row, BadConversation):
                raise row
            encoded = encode_conversation(row, tokenizer, stop_token_ids)
            if len(set(encoded["loss_mask"])) == 1:  # a fault of the template: each chat has a prompt and an answer
                check_masks(Dataset.from_dict({"loss_mask": [encoded["loss_mask"]]}), tokenizer)
            digest = hashlib.blake2b(np.array(encoded["input_ids"], np.int32).tobytes(), digest_size=16).digest()
            if digest in seen:
                raise BadConversation("duplicate")
            windows = split_conversation(row, encoded, tokenizer, max_seq_len)
        except BadConversation as bad:
            report[f"skipped: {bad.reason}"] += 1
            first.setdefault(f"skipped: {bad.reason}", f" (first in line {number}: {bad})")
            continue
        seen.add(digest)
        side = "eval" if is_eval(row, eval_fraction) else "train"
        sides[side].add(windows)
        report.update([side] + ["cut into windows"] * (len(windows) > 1))
        sample = sample or next((window for window in windows if window["loss_mask"].any()), None)

    assert report["read"] == report["train"] + report["eval"] + sum(report[reason] for reason in first), report
    counts = "; ".join(f"{count} {name}{first.get(name, '')}" for name, count in report.items())
    if progress:
        print(f"{input_file}: {counts}")
    if not report["train"] and (not report["eval"] or eval_fraction < 1):
        raise ValueError(f"{input_file}: no conversation left to train on: {counts or 'the file is empty'}")
    return report, sample


def load_blocks(folder, tokenizer=None, *, cache_dir=None) -> DatasetDict:
    """The splits "train" and "eval" of a folder that `pack_conversations` wrote, with the columns of BLOCKS.

    ``tokenizer``: if given, it has to be the one that the blocks were made with. ``cache_dir``: where datasets keeps its
    memory-mapped copy; its own cache if unset.

    Raises FileNotFoundError: the manifest or a shard is missing. ValueError: blocks are missing, or the tokenizer or its
    chat template is another one.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).exists():
        raise FileNotFoundError(f"{folder} has no {MANIFEST}: make the blocks with python -m data.sequence_packing")
    manifest = json.loads((folder / MANIFEST).read_text())
    if tokenizer is not None:
        hashes = {"tokenizer": tokenizer_fingerprint(tokenizer), "chat_template": _template_hash(tokenizer)}
        for name, value in hashes.items():
            if manifest[f"{name}_hash"] != value:
                raise ValueError(
                    f"the blocks in {folder} were made with another {name} (that of {manifest['tokenizer']!r}): "
                    "pack the conversations again with this one"
                )
    splits = DatasetDict()
    for side in ("train", "eval"):
        files = [str(folder / "data" / name) for name in _shard_names(side, manifest[side]["shards"])]
        splits[side] = Dataset.from_dict({name: [] for name in BLOCKS}, BLOCKS)
        if files:  # datasets refuses a split without rows
            splits[side] = load_dataset("parquet", data_files=files, split="train", cache_dir=cache_dir)
        if len(splits[side]) != manifest[side]["blocks"]:
            raise ValueError(
                f"{folder} holds {len(splits[side])} {side} blocks, but its manifest says {manifest[side]['blocks']}: "
                "pack the conversations again"
            )
    return splits


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.sequence_packing", description="Conversations to packed training blocks."
    )
    parser.add_argument("--input", required=True, help="conversations, one JSON object with `messages` per line")
    parser.add_argument("--output", required=True, help="folder for the blocks; it must not exist yet, or be empty")
    parser.add_argument("--max_seq_len", type=int, default=4096, help="tokens per block and window (%(default)s)")
    parser.add_argument(
        "--tokenizer", required=True, help="the target: folder or Hub id with tokenizer and chat template"
    )
    parser.add_argument("--eval_fraction", type=float, default=0.05, help="share held out for eval (%(default)s)")
    args = parser.parse_args(arguments)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        try:
            stop_ids = GenerationConfig.from_pretrained(args.tokenizer).eos_token_id
        except OSError:  # a folder with a tokenizer alone: its EOS is what ends a turn
            stop_ids = None
        pack_conversations(
            args.input,
            args.output,
            tokenizer,
            max_seq_len=args.max_seq_len,
            eval_fraction=args.eval_fraction,
            stop_token_ids=stop_ids if isinstance(stop_ids, list) else [i for i in [stop_ids] if i is not None],
        )
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
