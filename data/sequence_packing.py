"""A conversation file to packed training blocks: `python -m data.sequence_packing --input chats.jsonl --output blocks`.

Conversations are encoded, de-duplicated and split into train and eval; then those that are too long are cut into windows
(`data.windows`), and the windows of each side are packed into blocks of at most ``max_seq_len`` tokens.

The output folder is laid out as a data set of the Hub: ``data/train-00000-of-00002.parquet``, ``data/eval-...`` and
``manifest.json``. It grows in ``<output>.partial``, chunk by chunk, and is renamed once the manifest is in it, so a folder
of the final name is always whole. A killed run goes on after its last chunk and makes the very same files; a run never
touches an output that is there.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain, dropwhile, islice
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
from filelock import FileLock, Timeout
from pyarrow.parquet import ParquetFile
from tqdm.auto import tqdm
from trl import pack_dataset

from configuration_peagle import tokenizer_fingerprint
from data.chat_template import show_supervision
from data.conversations import files_of, read_rows
from data.hub import add_hub_arguments, public_name, publish
from data.windows import Report, read_windows
from target_peagle import load_tokenizer


BLOCKS = Features(
    {"input_ids": List(Value("int32")), "loss_mask": List(Value("int8")), "seq_lengths": List(Value("int32"))}
)
SIDES = ("train", "eval")
# Packed and written at a time, which bounds the memory. More would fill no better: only the last blocks stay open.
CHUNK_TOKENS, CHUNK_BLOCKS = 2**20, 64
MANIFEST = "manifest.json"


def pack_windows(windows: list[dict[str, np.ndarray]], max_seq_len: int) -> Dataset:
    """Windows (``input_ids`` and ``loss_mask``, arrays of shape (tokens,)) to blocks with the columns of BLOCKS.

    Best-fit decreasing; ``seq_lengths`` of a block holds the lengths of its windows in their order.
    Raises ValueError where a window is longer than ``max_seq_len``, as packing would cut it.
    """
    if not windows:
        return Dataset.from_dict({name: [] for name in BLOCKS}, BLOCKS)
    lengths = [len(window["input_ids"]) for window in windows]
    if max(lengths) > max_seq_len:
        raise ValueError(f"a window of {max(lengths)} tokens does not fit into blocks of {max_seq_len}: cut it first")
    # Built by hand, as Dataset.from_dict takes longer over arrays than the tokenizer over their text.
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    columns = {name: np.concatenate([window[name] for window in windows]) for name in ("input_ids", "loss_mask")}
    table = pa.table({name: pa.ListArray.from_arrays(offsets, pa.array(column)) for name, column in columns.items()})
    with quiet_datasets():
        return pack_dataset(Dataset(table), max_seq_len, "bfd", {"batch_size": None})


@contextmanager
def quiet_datasets():
    """Without the bars of datasets, of which every step of every chunk would show one."""
    disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not disabled:
            enable_progress_bars()


def pack_file(source, tokenizer, *, max_seq_len: int, progress: bool = True, **options) -> tuple[DatasetDict, Report]:
    """All blocks of a conversation file in memory, for a file that is small enough; see `read_windows` for the options.

    Returns the blocks (columns of BLOCKS), splits "train" and "eval", and the report, which is printed if ``progress``.
    """
    report, windows = Report(), {side: [] for side in SIDES}
    rows = tqdm(read_rows(source), desc="conversations", unit=" rows", disable=not progress)
    for _, side, cut in read_windows(rows, tokenizer, report, {}, max_seq_len=max_seq_len, **options):
        windows[side] += cut
    if progress:
        print(f"{source}: {report}")
    report.check(options["eval_fraction"])
    return DatasetDict({side: pack_windows(windows[side], max_seq_len) for side in SIDES}), report


class Progress:
    """What an unfinished run has done: in ``folder``, the settings, one record for each chunk, and the blocks so far.

    ``whole`` is for a block of one whole conversation, to be shown.

    Raises ValueError where it was begun with other ``settings`` (a dict that JSON can hold).
    """

    def __init__(self, folder: Path, settings: dict):
        self.folder, self.blocks = folder, folder / "blocks"
        self.row, self.report, self.seen, self.whole = 0, Report(), {}, []
        self.counts = {side: Counter(shards=0, **dict.fromkeys(COUNTS, 0)) for side in SIDES}
        if not self.blocks.exists():  # records of a run that was killed once its blocks were the output
            for record in folder.glob("*.json"):
                record.unlink()
        (self.blocks / "data").mkdir(parents=True, exist_ok=True)
        record = folder / "settings.json"
        if record.exists():
            begun = json.loads(record.read_text())
            if differ := [name for name in settings if begun.get(name) != settings[name]]:
                raise ValueError(f"{folder} is an unfinished run with another {', '.join(differ)}: delete it first")
        write_atomically(record, json.dumps(settings).encode())
        self.chunk = 0
        while (record := folder / f"chunk-{self.chunk:05}.json").exists():
            done = json.loads(record.read_text())
            self.row, self.report = done["row"], Report(done["counts"], done["first"])
            self.counts = {side: Counter(done[side]) for side in SIDES}
            digests = bytes.fromhex(done["digests"])
            self.seen.update(dict.fromkeys(digests[i : i + 16] for i in range(0, len(digests), 16)))
            self.chunk += 1

    def write(self, row: int, windows: dict[str, list], known: int, max_seq_len: int) -> None:
        """Pack and write one chunk, which ends with ``row``; the digests in ``seen`` from number ``known`` on are its own."""
        for side, gathered in windows.items():
            if not gathered:
                continue
            blocks = pack_windows(gathered, max_seq_len)
            supervised = [int(window["loss_mask"].sum()) for window in gathered]
            target = self.blocks / "data" / f"{side}-{self.counts[side]['shards']:05}.parquet"
            with quiet_datasets():
                blocks.to_parquet(f"{target}.tmp")
            os.replace(f"{target}.tmp", target)
            values = (
                len(blocks),
                len(gathered),
                supervised.count(0),
                sum(map(len, blocks["input_ids"])),
                sum(supervised),
            )
            self.counts[side].update(shards=1, **dict(zip(COUNTS, values)))
        record = {"row": row, "counts": self.report.counts, "first": self.report.first, **self.counts}
        record["digests"] = b"".join(islice(self.seen, known, None)).hex()
        write_atomically(self.folder / f"chunk-{self.chunk:05}.json", json.dumps(record).encode())
        self.chunk += 1

    def finish(self, manifest: dict, output: Path) -> None:
        """Give the shards their final names, write the manifest, and move all to ``output``."""
        for side in SIDES:
            for index, name in enumerate(_shard_names(side, self.counts[side]["shards"])):
                begun = self.blocks / "data" / f"{side}-{index:05}.parquet"
                if begun.exists():  # a run killed here may have renamed it
                    os.rename(begun, self.blocks / "data" / name)
        (self.blocks / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        os.rename(self.blocks, output)


@contextmanager
def only_writer(partial: Path):
    """Hold the lock of the folder of an unfinished run, and delete the folder if nothing to go on with is left in it.

    Raises ValueError where another run holds the lock; its folder is left alone.
    """
    partial.mkdir(parents=True, exist_ok=True)
    lock = FileLock(partial / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        output = partial.with_suffix("")
        raise ValueError(f"another run is writing {output}: wait for it, or name another output") from None
    try:
        yield
    finally:
        if not ((partial / "blocks").exists() and (partial / "chunk-00000.json").exists()):
            shutil.rmtree(partial)
        lock.release()


COUNTS = ("blocks", "windows", "windows_without_supervision", "tokens", "supervised")


def write_atomically(path: Path, content: bytes) -> None:
    path.with_suffix(".tmp").write_bytes(content)
    os.replace(path.with_suffix(".tmp"), path)


def _shard_names(side: str, shards: int) -> list[str]:
    return [f"{side}-{index:05}-of-{shards:05}.parquet" for index in range(shards)]


def template_hash(tokenizer) -> str:
    """SHA-256 of the chat template or, where there are several, of all of them under their names."""
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()


def pack_conversations(
    source,
    output,
    tokenizer,
    *,
    max_seq_len: int,
    eval_fraction: float = 0.05,
    stop_token_ids: Collection[int] = (),
    progress: bool = True,
) -> dict:
    """Encode, de-duplicate, split, cut and pack conversations into the folder ``output``, going on with a killed run.

    ``source``: see `read_rows`. ``tokenizer``: a fast one with a chat template. ``max_seq_len``: tokens per block, at least 8.
    See `read_windows` for the rest. ``progress``: show a bar, then the counts and one conversation, a whole one if
    there is one, with its supervised tokens in brackets.

    Returns the manifest. Its "conversations" are the counts of a [`Report`]. Memory does not grow with the file, but for
    about 100 bytes per conversation, by which duplicates are known.

    Raises ValueError: an argument is out of range, the tokenizer is unfit, all masks are one, nothing is left to
    train on, or the unfinished run has other settings. FileExistsError: there is something in ``output``. OSError: reading or
    writing failed. After any of these there is no output; what is done stays in ``<output>.partial``.
    """
    output = Path(output)
    partial = output.with_name(f"{output.name}.partial")
    settings = {
        "max_seq_len": max_seq_len,
        "eval_fraction": eval_fraction,
        "input": fingerprint(source),
        "tokenizer_hash": tokenizer_fingerprint(tokenizer),
        "chat_template_hash": template_hash(tokenizer),
        "stop_token_ids": sorted(stop_token_ids),
    }
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        made = json.loads((output / MANIFEST).read_text()) if (output / MANIFEST).is_file() else {}
        if any(made.get(name) != value for name, value in settings.items()):
            raise FileExistsError(f"{output} is there already: delete it, or name another output")
        print(f"{output} is made already, with the same settings")
        if partial.exists():
            with only_writer(partial):  # which deletes it if the run that made the output was killed right after
                pass
        return made
    with only_writer(partial):
        done = Progress(partial, settings)
        rows = tqdm(read_rows(source), desc="conversations", unit=" rows", disable=not progress)
        options = {"eval_fraction": eval_fraction, "stop_token_ids": stop_token_ids}
        write_chunks(done, rows, tokenizer, max_seq_len=max_seq_len, **options)
        if progress:
            print(f"{source}: {done.report}")
        try:
            done.report.check(eval_fraction)
        except ValueError:
            shutil.rmtree(done.blocks)  # another run would come to the same end
            raise
        manifest = settings | {
            "tokenizer": public_name(tokenizer.name_or_path),
            "conversations": dict(done.report.counts),
        }
        for side in SIDES:
            capacity = done.counts[side]["blocks"] * max_seq_len
            manifest[side] = done.counts[side] | {"fill": done.counts[side]["tokens"] / capacity if capacity else None}
        manifest["versions"] = {"python": platform.python_version()}
        manifest["versions"] |= {name: version(name) for name in ("transformers", "tokenizers", "datasets", "trl")}
        done.finish(manifest, output)
    if progress:
        for side in SIDES:
            counts = {
                key: f"{n:.1%}" if key == "fill" else f"{n:,}" for key, n in manifest[side].items() if n is not None
            }
            print(f"{side}:", ", ".join(f"{key} {n}" for key, n in counts.items()))
        # In the blocks the first may well be a window that begins or ends within a turn.
        sample = first_sample(chain(done.whole, blocks_of(output)), tokenizer)
        print("a sample, supervised tokens in brackets:", sample, sep="\n")
    return manifest


def write_chunks(done: Progress, rows, tokenizer, *, max_seq_len: int, **options) -> None:
    """Write all chunks of ``rows`` that are not written yet."""
    size, started = max(CHUNK_TOKENS, CHUNK_BLOCKS * max_seq_len), done.row
    left = dropwhile(lambda numbered: numbered[0] <= started, rows)
    windows, tokens, known = {side: [] for side in SIDES}, 0, len(done.seen)
    for row, side, cut in read_windows(left, tokenizer, done.report, done.seen, max_seq_len=max_seq_len, **options):
        windows[side] += cut
        if not done.whole and len(cut) == 1:
            done.whole = [
                {name: cut[0][name].tolist() for name in cut[0]} | {"seq_lengths": [len(cut[0]["input_ids"])]}
            ]
        tokens += sum(len(window["input_ids"]) for window in cut)
        if tokens >= size:
            done.write(row, windows, known, max_seq_len)
            windows, tokens, known = {side: [] for side in SIDES}, 0, len(done.seen)
    if started < sys.maxsize:  # else the last chunk is written
        done.write(sys.maxsize, windows, known, max_seq_len)


def first_sample(blocks: Iterable[dict], tokenizer) -> str:
    """The first document with supervised tokens, in text; see `show_supervision`."""
    for block in blocks:
        ends = np.cumsum(block["seq_lengths"])
        for start, end in zip(ends - block["seq_lengths"], ends):
            if any(mask := block["loss_mask"][start:end]):
                return show_supervision(block["input_ids"][start:end], mask, tokenizer)
    return "none"


def blocks_of(folder: Path) -> Iterator[dict]:
    """The blocks of a folder one by one, those of train first."""
    for shard in sorted((folder / "data").iterdir(), reverse=True):
        for batch in ParquetFile(shard).iter_batches(batch_size=16):
            yield from batch.to_pylist()


def fingerprint(source) -> dict:
    """Name and, of what is local, a hash of the contents; of a folder, over the names and contents of its files."""
    path = Path(source)
    if path.is_dir():
        parts = [[str(file.relative_to(path)), fingerprint(file)["sha256"]] for file in files_of(path)]
        return {"name": path.name, "sha256": hashlib.sha256(json.dumps(parts).encode()).hexdigest()}
    if not path.is_file():
        return {"name": str(source)}
    with path.open("rb") as file:
        return {"name": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def load_blocks(folder, tokenizer=None, *, cache_dir=None) -> DatasetDict:
    """The splits "train" and "eval" of a folder that `pack_conversations` wrote, with the columns of BLOCKS.

    ``tokenizer``: if given, it has to be the one that the blocks were made with. ``cache_dir``: where datasets keeps its
    memory-mapped copy; its own cache if unset.

    Raises FileNotFoundError: the manifest or a shard is missing. ValueError: the folder holds features, blocks are
    missing, or the tokenizer or its chat template is another one.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).exists():
        raise FileNotFoundError(f"{folder} has no {MANIFEST}: make the blocks with python -m data.sequence_packing")
    manifest = json.loads((folder / MANIFEST).read_text())
    if "layer_ids" in manifest:
        raise ValueError(
            f"{folder} holds features, not blocks: name it with --feature_dir, or the folder of the blocks here"
        )
    if tokenizer is not None:
        hashes = {"tokenizer": tokenizer_fingerprint(tokenizer), "chat_template": template_hash(tokenizer)}
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
            with quiet_datasets():
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
    parser.add_argument(
        "--input",
        required=True,
        help="conversations: a JSON Lines file, local or hf://, a Parquet file, a folder, or a data set of the Hub",
    )
    parser.add_argument("--output", required=True, help="folder for the blocks; it must not exist yet, or be empty")
    parser.add_argument("--max_seq_len", type=int, default=4096, help="tokens per block and window (%(default)s)")
    parser.add_argument("--tokenizer", help="the target: folder or Hub id; the default target's if unset")
    parser.add_argument("--eval_fraction", type=float, default=0.05, help="share held out for eval (%(default)s)")
    add_hub_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        tokenizer, stop_ids = load_tokenizer(args.tokenizer)
        options = {"max_seq_len": args.max_seq_len, "eval_fraction": args.eval_fraction, "stop_token_ids": stop_ids}
        manifest = pack_conversations(args.input, args.output, tokenizer, **options)
        if args.push_to_hub:
            print("published:", publish("blocks", args.output, args.push_to_hub, manifest, args))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
