"""What is published of each step: the exact folder, its card, and that it is read back. Nothing goes anywhere."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from chats import chat, chatml, write
from datasets import load_dataset
from huggingface_hub import DatasetCard

from data import extract_features, generate_data, sequence_packing
from data.conversations import read_rows
from data.hub import KINDS, make_card, public_name, publish
from data.sequence_packing import load_blocks, pack_conversations


def rows_of(count):
    return [{"messages": chat(f"Question {i}", f"Answer {i}")} for i in range(count)]


def dry(folder, license="mit"):
    return SimpleNamespace(dry_run=str(folder), license=license, private=False)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("step", [generate_data, sequence_packing, extract_features])
def test_a_dry_run_of_no_data_set_is_refused_by_every_step(step, tmp_path, capsys):
    options = ["--input", "none"] if step is not generate_data else []
    with pytest.raises(SystemExit):
        step.main([*options, "--output", str(tmp_path / "out"), "--dry_run", str(tmp_path / "published")])
    assert "required: --push_to_hub" in capsys.readouterr().err and not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_cards_say_what_the_data_are_and_how_they_are_used(kind):
    card = make_card(kind, "org/some", {"train": {"shards": 1}, "eval": {"shards": 0}}, "mit")
    title = card.data.pretty_name
    assert title.startswith("some: ") and f"# {title}\n" in card.text and "org/some" in card.text
    snippets = re.findall("```python\n(.*?)```", card.text, flags=re.DOTALL)
    assert len(snippets) == 1
    for line in snippets[0].splitlines():
        if line.startswith("from "):
            exec(line, {})  # what the snippet imports is there
    assert ("`datasets.load_dataset` cannot read" in card.text) == (kind == "features")


def test_public_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own/chats").mkdir(parents=True)
    names = ["org/chats", "own/chats/", ".", "/there/is/none", "hf://datasets/org/chats/a.jsonl"]
    assert [public_name(name) for name in names] == ["org/chats", "chats", tmp_path.name, "none", names[-1]]


def test_blocks(tmp_path, own_cache):
    path, blocks, folder = write(tmp_path, rows_of(40)), tmp_path / "blocks", tmp_path / "published"
    chatml().save_pretrained(tmp_path / "tokenizer")
    options = ["--input", path, "--output", blocks, "--tokenizer", tmp_path / "tokenizer", "--max_seq_len", 64]
    options += ["--eval_fraction", 0.3, "--push_to_hub", "org/chats", "--license", "mit", "--dry_run", folder]
    sequence_packing.main(list(map(str, options)))
    assert {file.relative_to(folder) for file in folder.rglob("*") if file.is_file()} == {
        *(file.relative_to(blocks) for file in blocks.rglob("*") if file.is_file()),
        *map(type(path), ["README.md"]),
    }
    card = DatasetCard.load(folder / "README.md")
    assert card.data.license == "mit" and card.text.startswith("\n# chats")
    assert json.loads((blocks / "manifest.json").read_text())["input"]["sha256"] in card.text
    published, ours = load_dataset(str(folder)), load_blocks(blocks)
    for side in ("train", "eval"):
        assert published[side].to_list() == ours[side].to_list() and len(ours[side]) > 3
    with pytest.raises(SystemExit, match="published is there already"):
        options[3] = tmp_path / "blocks2"
        sequence_packing.main(list(map(str, options)))


def test_a_side_without_blocks_is_no_split(tmp_path, own_cache):
    pack = {"max_seq_len": 64, "eval_fraction": 0, "progress": False}
    manifest = pack_conversations(write(tmp_path, rows_of(9)), tmp_path / "blocks", chatml(), **pack)
    publish("blocks", tmp_path / "blocks", "org/chats", manifest, dry(tmp_path / "published"))
    assert load_dataset(str(tmp_path / "published")).keys() == {"train"}


def test_conversations(tmp_path, own_cache):
    path = write(tmp_path, rows_of(5))
    manifest = {"settings": {"target": "org/target"}, "counts": {"in": 5, "done": 5}}
    (tmp_path / "chats.jsonl.manifest.json").write_text(json.dumps(manifest))
    folder = tmp_path / "published"
    told = publish("conversations", path, "org/chats", manifest, dry(folder))
    assert told == f"nothing yet, see {folder} for what would be"
    assert [row for _, row in read_rows(folder)] == rows_of(5)
    assert "org/target" in (folder / "README.md").read_text()


def test_features_are_published_without_locks_and_rests(tmp_path):
    features, folder = tmp_path / "features", tmp_path / "published"
    (features / ".partial").mkdir(parents=True)
    for name in (".lock", ".partial/rest", "manifest.json", "train-00000-of-00001.safetensors"):
        (features / name).write_text("{}")
    publish("features", features, "org/features", {}, dry(folder))
    (folder / "manifest.json").write_text("edited")  # a copy's own
    assert (features / "manifest.json").read_text() == "{}"
    assert {file.name for file in folder.rglob("*")} == {
        "README.md",
        "manifest.json",
        "train-00000-of-00001.safetensors",
    }


@pytest.mark.parametrize("links", [True, False])
def test_an_upload_has_what_a_dry_run_has(links, tmp_path, monkeypatch):
    """With a stand-in for the Hub, which takes note of what it is sent."""
    features, sent = tmp_path / "features", {}
    features.mkdir()
    (features / "manifest.json").write_text("{}")
    monkeypatch.setattr("data.hub.HfApi.create_repo", lambda self, repo_id, **options: None)

    def upload_folder(self, repo_id, folder_path, repo_type):
        sent.update({file.name: file.read_text() for file in Path(folder_path).iterdir()})

    def no_link(source, copy):
        raise OSError("no links here")

    monkeypatch.setattr("data.hub.HfApi.upload_folder", upload_folder)
    if not links:
        monkeypatch.setattr("data.hub.os.link", no_link)
    args = dry("")
    assert publish("features", features, "org/f", {}, args) == "https://huggingface.co/datasets/org/f"
    publish("features", features, "org/f", {}, dry(tmp_path / "published"))
    assert sent == {file.name: file.read_text() for file in (tmp_path / "published").iterdir()}
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("tmp")] == []
