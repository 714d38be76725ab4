"""Conversations, blocks and feature shards to the Hub: what a step wrote, with a card made from its manifest."""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData, HfApi
from huggingface_hub.utils import validate_repo_id


# Of each step's output: a title, what it is, and how it is used.
KINDS = {
    "conversations": (
        "conversations in the target's own words",
        "Conversations whose assistant turns were written by the target model itself, one JSON object per line.",
        """```python
from datasets import load_dataset

chats = load_dataset("{repo_id}", split="train")
```

To train a P-EAGLE drafter on them: `python -m data.sequence_packing --input {repo_id} --output blocks`.""",
    ),
    "blocks": (
        "packed blocks to train a P-EAGLE drafter",
        "Conversations packed into blocks for training a P-EAGLE drafter: token ids, a mask of the tokens that the target "
        "would generate, and the lengths of the documents in each block, which do not see each other.",
        """```python
from datasets import load_dataset

blocks = load_dataset("{repo_id}")
```

To train on them:

```bash
hf download {repo_id} --repo-type dataset --local-dir blocks
python train_peagle.py --train_dir blocks
```""",
    ),
    "features": (
        "features to train a P-EAGLE drafter",
        "Hidden states of the target model over packed conversations, for training a P-EAGLE drafter: safetensors shards, "
        "described in manifest.json.",
        """`datasets.load_dataset` cannot read the shards; the repository of the drafter can, from a local folder:

```bash
hf download {repo_id} --repo-type dataset --local-dir features
python train_peagle.py --feature_dir features
```

```python
from data.feature_shards import FeatureShards

blocks = FeatureShards("features")  # blocks[0] is a dict of tensors
```""",
    ),
}

# What each step writes, of which all is published and nothing else that lies there.
WRITTEN = {"blocks": ["manifest.json", "data/*.parquet"], "features": ["manifest.json", "*.safetensors"]}
# Shards that an earlier push may have left: a card's patterns would take them for ours.
SHARDS = [f"data/{side}-*-of-*.parquet" for side in ("train", "eval")]
SHARDS += [f"{side}-*-of-*.safetensors" for side in ("train", "eval")]


def hub_id(name: str) -> str:
    """An argument as it is, if it can name something of the Hub: told at once, not when hours of work are to be published."""
    validate_repo_id(name)
    if "/" not in name:
        raise ValueError(f"{name} does not read org/name")
    return name


def add_hub_arguments(parser, what: str = "data set", required: bool = False) -> None:
    """The arguments of [`send`]; ``what``: is published, ``required``: and nothing else is done."""
    add = parser.add_argument
    push = add(
        "--push_to_hub",
        type=hub_id,
        metavar="ORG/NAME",
        required=required,
        help=f"publish the finished output as this {what} of the Hub",
    )
    add("--license", default="other", help=f"licence of the {what}, for the card (%(default)s)")
    add("--private", action="store_true", help=f"keep the {what} private")

    class DryRun(argparse.Action):
        def __call__(self, parser, namespace, folder, option_string=None):
            if not folder:
                raise argparse.ArgumentError(self, "names no folder, and nothing is published with it")
            push.required = True  # the card names it; without a name nothing would be laid out
            setattr(namespace, self.dest, folder)

    add(
        "--dry_run",
        action=DryRun,
        metavar="FOLDER",
        help="with --push_to_hub: write what would be published here, and publish nothing",
    )


def public_name(source) -> str:
    """What a manifest calls an input or a target: a name on the Hub as it is, of a local path the last part, because the
    rest tells of this machine only."""
    path = Path(os.path.expanduser(source))
    return Path(os.path.abspath(path)).name if path.is_absolute() or path.exists() else str(source)


def make_card(kind: str, repo_id: str, manifest: dict, license: str) -> DatasetCard:
    """The card: the splits that `datasets.load_dataset` finds, what the data are, and where they come from."""
    files = {"train": "data/train.jsonl"} if kind == "conversations" else {}
    if kind == "blocks":
        files = {side: f"data/{side}-*.parquet" for side in ("train", "eval") if manifest[side]["shards"]}
    title, about, usage = KINDS[kind]
    splits = [{"split": split, "path": pattern} for split, pattern in files.items()]
    data = DatasetCardData(
        pretty_name=f"{repo_id.split('/')[-1]}: {title}",
        license=license,
        task_categories=["text-generation"],
        tags=["peagle", "speculative-decoding"],
        configs=[{"config_name": "default", "data_files": splits}] if splits else None,
    )
    text = f"# {data.pretty_name}\n\n{about}\n\n## Usage\n\n{usage.format(repo_id=repo_id)}\n\n"
    text += f"## Provenance\n\n```json\n{json.dumps(manifest, indent=2)}\n```\n"
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def _link(source, copy) -> None:
    try:
        os.link(source, copy)
    except OSError:  # a disk without links
        shutil.copy2(source, copy)


def lay_out(kind: str, output: Path, folder: Path, card: DatasetCard, copy=shutil.copy2) -> None:
    """Fill ``folder`` with exactly what is published; ``copy`` makes a file of the output a file there."""
    if kind == "conversations":
        (folder / "data").mkdir(parents=True)
        copy(output, folder / "data/train.jsonl")
        copy(f"{output}.manifest.json", folder / "manifest.json")
    else:
        for file in {file for pattern in WRITTEN[kind] for file in output.glob(pattern)}:
            (folder / file.relative_to(output)).parent.mkdir(parents=True, exist_ok=True)
            copy(file, folder / file.relative_to(output))
    card.save(folder / "README.md")


def send(
    lay_out: Callable[[Path], None],
    repo_id: str,
    args,
    *,
    repo_type: str,
    replaced: list[str],
    space_sdk: str | None = None,
    place: Path | None = None,
    ready: str = "",
) -> str:
    """Publish what ``lay_out`` fills a folder with, or leave that in ``args.dry_run``; returns what to tell: where it went.

    ``args``: with the values of `add_hub_arguments`; ``replaced``: patterns of the files that an earlier push may have left,
    which are deleted, others are left; ``place``: where the folder may be until it is uploaded; ``ready``: what an error
    begins with. The token comes from huggingface_hub's login or the environment. Raises FileExistsError where the folder of a
    dry run is there, and OSError where publishing fails.
    """
    if args.dry_run is not None:
        dry = Path(args.dry_run)
        if dry.exists():
            raise FileExistsError(f"{dry} is there already: delete it, or name another folder")
        dry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=dry.parent) as part:  # all of it or nothing
            folder = Path(part, "folder")
            folder.mkdir()
            lay_out(folder)
            folder.rename(dry)
        return f"nothing yet, see {args.dry_run} for what would be"
    api, repo = HfApi(), {"repo_id": repo_id, "repo_type": repo_type}
    with tempfile.TemporaryDirectory(dir=place) as folder:
        lay_out(Path(folder))
        try:
            # Where nothing is asked an organization's own default holds, which may well be private.
            url = api.create_repo(**repo, private=args.private or None, exist_ok=True, space_sdk=space_sdk)
            if args.private and not api.repo_info(**repo).private:
                raise ValueError("it is there already, and public")
            api.upload_folder(**repo, folder_path=folder, delete_patterns=replaced)
        except Exception as error:  # huggingface_hub's, httpx's and hf_xet's, which share no base
            raise OSError(
                f"{ready}{repo_id} was not published: {error}\nSee that the Hub is reached, and log in with `hf auth login` as "
                "someone who may write there, or choose another name; then run the same command again, which goes on with "
                "publishing"
            ) from error
    return str(url)


def publish(kind: str, output, repo_id: str, manifest: dict, args) -> str:
    """Publish what a step wrote, or lay it out in ``args.dry_run``; see [`send`] for what is returned and raised.

    ``kind``: one of KINDS. The output is left as it is. Raises ValueError where the folder of a dry run would be part of it.
    """
    output, card = Path(output), make_card(kind, repo_id, manifest, args.license)
    if args.dry_run is not None and output.resolve() in Path(args.dry_run).resolve().parents:
        raise ValueError(
            f"{args.dry_run} lies in {output}, and would be taken for a part of it: name a folder elsewhere"
        )
    # For a dry run copies, though they take the output's size once more: whoever edits links would edit the output. Nobody
    # edits what is gone after the upload.
    copy = shutil.copy2 if args.dry_run else _link
    return send(
        lambda folder: lay_out(kind, output, folder, card, copy),
        repo_id,
        args,
        place=output.parent,
        ready=f"{output} is whole, but ",
        repo_type="dataset",
        replaced=SHARDS,
    )
