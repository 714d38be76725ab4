"""Conversations, blocks and feature shards to the Hub: each step's output folder, with a card made from its manifest."""

import json
import shutil
from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData, HfApi


KINDS = {
    "conversations": "Conversations whose assistant turns were written by the target model itself, one JSON object per line.",
    "blocks": "Conversations packed into blocks for training a P-EAGLE drafter: token ids, a mask of the tokens that the "
    "target would generate, and the lengths of the documents in each block, which do not see each other.",
    "features": "Hidden states of the target model over packed conversations, for training a P-EAGLE drafter: safetensors "
    "shards, described in manifest.json.",
}


def add_hub_arguments(parser) -> None:
    parser.add_argument(
        "--push_to_hub", metavar="ORG/NAME", help="upload the finished output to this data set of the Hub"
    )
    parser.add_argument("--license", default="other", help="licence of the data, for the card (%(default)s)")
    parser.add_argument("--private", action="store_true", help="make the data set private")
    parser.add_argument(
        "--dry_run", metavar="FOLDER", help="write the exact folder that would be uploaded here instead"
    )


def make_card(kind: str, name: str, manifest: dict, files: dict[str, str], license: str) -> DatasetCard:
    """The card of a data set: its splits (``files``: name to path pattern), and where it comes from."""
    data = DatasetCardData(
        license=license,
        task_categories=["text-generation"],
        tags=["peagle", "speculative-decoding"],
        configs=[
            {
                "config_name": "default",
                "data_files": [{"split": split, "path": pattern} for split, pattern in files.items()],
            }
        ]
        if files
        else None,
    )
    text = f"# {name}\n\n{KINDS[kind]}\n\n## Provenance\n\n```json\n{json.dumps(manifest, indent=2)}\n```\n"
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def publish(kind: str, folder, repo_id: str, manifest: dict, files: dict[str, str], args) -> str:
    """Upload an output folder with a card, or copy it to ``args.dry_run``. Returns where it went.

    Raises FileExistsError where the folder of a dry run is there already, and the errors of huggingface_hub; the token
    comes from its login or the environment only.
    """
    card = make_card(kind, repo_id.split("/")[-1], manifest, files, args.license)
    if args.dry_run:
        shutil.copytree(folder, args.dry_run)
        card.save(Path(args.dry_run, "README.md"))
        return str(args.dry_run)
    api = HfApi()
    api.create_repo(repo_id, repo_type="dataset", private=args.private, exist_ok=True)
    api.upload_folder(repo_id=repo_id, folder_path=folder, repo_type="dataset")
    card.push_to_hub(repo_id, repo_type="dataset")
    return f"https://huggingface.co/datasets/{repo_id}"
