"""What an extraction is about to write: settings, shards and sizes, and what of it is there already."""

import hashlib
import json
import platform
import re
import shutil
from argparse import ArgumentTypeError
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from datasets import Dataset
from tqdm.auto import tqdm

from configuration_peagle import default_layer_ids, tokenizer_fingerprint
from data.feature_shards import (
    AGAIN,
    FORMAT,
    MANIFEST,
    PARTIAL,
    inspect_shard,
    read_manifest,
    shard_names,
    write_manifest,
)
from data.hub import public_name
from data.sequence_packing import load_blocks
from data.target_signals import check_length, weights_fingerprint


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
NORM = (
    "features: for each of layer_ids the residual stream that enters that decoder layer (transformers' hidden_states of that "
    "index, 0 being the embeddings), before the layer's norm; last_hidden: the output of the final norm, what the head takes"
)


def parse_size(text: str) -> int:
    """Bytes of a size like 10GB, 500 MB, 1.5GiB or 4096. Raises ArgumentTypeError, whose text argparse shows."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if not match or match[2].upper() not in UNITS:
        raise ArgumentTypeError(f"{text!r} is not a size: write it like 50GB or 500MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def show_size(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


class Shard(NamedTuple):
    name: str
    split: str
    blocks: range
    tokens: int


def plan_shards(blocks: dict[str, Dataset], per_shard: int) -> list[Shard]:
    """Which blocks go into which file."""
    plan = []
    for split, side in blocks.items():
        tokens = [sum(lengths) for lengths in side["seq_lengths"]]
        starts = range(0, len(side), per_shard)
        for start, name in zip(starts, shard_names(split, len(starts))):
            inside = range(start, min(start + per_shard, len(side)))
            plan.append(Shard(name, split, inside, sum(tokens[inside.start : inside.stop])))
    return plan


class FeaturePlan:
    """The blocks, the settings and the folder of one extraction; see `extract_features` for the arguments and errors."""

    def __init__(self, target, tokenizer, source, output, layer_ids, dtype: str, shard_size: int, revision):
        self.output = Path(output)
        text = target.config.get_text_config()
        layers, self.width = text.num_hidden_layers, text.hidden_size
        self.layer_ids = default_layer_ids(layers) if layer_ids is None else list(layer_ids)
        ids = self.layer_ids
        if not ids or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < layers:
            raise ValueError(f"layer_ids {ids} must be distinct, ascending and from 0 to {layers - 1} for this target")
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}, choose from {', '.join(DTYPES)}")
        self.dtype = DTYPES[dtype]
        self.blocks = load_blocks(source, tokenizer)
        check_length(target, max(max(lengths) for side in self.blocks.values() for lengths in side["seq_lengths"]))
        made = (Path(source) / MANIFEST).read_bytes()
        self.made = json.loads(made)
        # Beside the signals int32 ids and positions and the int8 mask; borders and headers are too few to count.
        self.token_bytes = (len(ids) + 1) * self.width * self.dtype.itemsize + 9
        longest = self.made["max_seq_len"]
        per_shard = min(shard_size // self.token_bytes, 2**31 - 1) // longest  # offsets are int32
        if per_shard < 1:
            raise ValueError(
                f"a shard of {show_size(shard_size)} does not hold one block of {longest} tokens of {self.token_bytes:,} "
                f"bytes: give --shard_size {self.token_bytes * longest} or more"
            )
        self.shards = plan_shards(self.blocks, per_shard)
        self.settings = {
            "format": FORMAT,
            "target": public_name(target.name_or_path),
            "revision": revision,
            "target_weights": weights_fingerprint(target),
            "target_dtype": str(target.dtype).removeprefix("torch."),
            "attn_implementation": target.config._attn_implementation,
            "num_hidden_layers": layers,
            "hidden_size": self.width,
            "layer_ids": ids,
            "dtype": dtype,
            "norm_convention": NORM,
            "tokenizer_hash": tokenizer_fingerprint(tokenizer),
            "chat_template_hash": self.made["chat_template_hash"],
            "blocks_hash": hashlib.sha256(made).hexdigest(),
            "blocks_per_shard": per_shard,
        }
        self.mark = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()

    def notes(self, shard: Shard) -> dict[str, str]:
        """What the header of a shard must say."""
        return {"name": shard.name, "settings": self.mark}

    def open(self, progress: bool) -> list[Shard]:
        """Make the output folder ready for this run, and return the shards to make: those not there or not whole.

        Raises ValueError where the folder was made with other settings, FileExistsError where it holds something else.
        """
        if not (self.output / MANIFEST).exists():
            if any(not file.name.startswith(".") for file in self.output.iterdir()):
                raise FileExistsError(f"{self.output} holds other files: name another output")
        else:
            manifest = read_manifest(self.output)
            differ = [key for key, value in self.settings.items() if manifest.get(key) != value]
            if differ:
                words = "; ".join(f"{key} {manifest.get(key)} there and {self.settings[key]} here" for key in differ)
                raise ValueError(
                    f"{self.output} was made with other settings: {words}. Use the same or another output"
                )
        shutil.rmtree(self.output / PARTIAL, ignore_errors=True)  # what a killed run left
        (self.output / PARTIAL).mkdir()
        checked = tqdm(self.shards, desc="checking shards", leave=False, disable=not progress)
        return [shard for shard in checked if inspect_shard(self.output / shard.name, self.notes(shard)) is None]

    def start(self, missing: list[Shard]) -> None:
        """Say in the folder that it is being written, and delete what is not whole, which makes room."""
        write_manifest(self.output, self.settings | {"complete": False})
        for shard in missing:
            (self.output / shard.name).unlink(missing_ok=True)

    def check_disk(self, missing: list[Shard], max_disk: int, progress: bool) -> None:
        """Print what the shards take. Raises OSError if that is over ``max_disk`` or the free space."""
        tokens, needed = (sum(shard.tokens for shard in shards) for shards in (self.shards, missing))
        total, needed = tokens * self.token_bytes, needed * self.token_bytes
        free = shutil.disk_usage(self.output).free
        if progress:
            print(
                f"{tokens:,} tokens x {self.token_bytes:,} bytes = {show_size(total)} in {len(self.shards)} shards; "
                f"{show_size(needed)} in {len(missing)} to write, {show_size(free)} free"
            )
        fix = "Extract fewer blocks, fewer --layer_ids or a shorter --dtype"
        if total > max_disk:
            raise OSError(
                f"the features take {show_size(total)}, over --max_disk {show_size(max_disk)}. {fix}, or raise --max_disk"
            )
        if needed > free:
            raise OSError(
                f"{show_size(needed)} are to be written, but {self.output} has {show_size(free)} free. {fix}, or make room"
            )

    def finish(self) -> dict:
        """Return the final manifest, written now unless there is one already.

        Raises ValueError where the counts are not those of the blocks.
        """
        manifest = read_manifest(self.output)
        if manifest["complete"]:
            return manifest
        files, counts = {}, {split: {"shards": 0, "blocks": 0, "tokens": 0, "supervised": 0} for split in self.blocks}
        for shard in self.shards:
            found = inspect_shard(self.output / shard.name, self.notes(shard), whole=False)
            if found is None:
                raise ValueError(f"{self.output / shard.name} has gone or was damaged meanwhile: {AGAIN}")
            files[shard.name] = {"bytes": (self.output / shard.name).stat().st_size, "sha256": found["sha256"]}
            for name, one in {"shards": 1, **found}.items():
                if name in counts[shard.split]:
                    counts[shard.split][name] += one
        for split, count in counts.items():
            wrong = [name for name in ("blocks", "tokens", "supervised") if count[name] != self.made[split][name]]
            if wrong:
                raise ValueError(f"{split} has {count}, but the manifest of the blocks says {self.made[split]}")
        packages = ("torch", "transformers", "safetensors", "accelerate", "datasets")
        versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
        manifest = self.settings | {"complete": True, **counts, "files": files, "versions": versions}
        write_manifest(self.output, manifest)
        return manifest
