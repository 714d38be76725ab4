"""What is published of each step: the exact folder, its card, and that it is read back, also by way of a small Hub on this
machine. Nothing goes anywhere else."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from chats import CALL, TOOL, TOOLS, chat, chatml, write
from datasets import load_dataset
from feature_helpers import assert_same
from hub_server import TOKEN, ask, contents, history, published
from huggingface_hub import DatasetCard

from data import extract_features, generate_data, sequence_packing
from data.conversations import read_rows
from data.feature_shards import FeatureShards
from data.hub import KINDS, make_card, public_name, publish
from data.sequence_packing import load_blocks, pack_conversations


pytest_plugins = ("feature_helpers", "hub_server")


def rows_of(count):
    return [{"messages": chat(f"Question {i}", f"Answer {i}")} for i in range(count)]


def dry(folder, license="mit"):
    return SimpleNamespace(dry_run=folder and str(folder), license=license, private=False)


@pytest.mark.parametrize("step", [generate_data, sequence_packing, extract_features])
def test_a_dry_run_of_no_data_set_is_refused_by_every_step(step, tmp_path, capsys):
    options = ["--input", "none"] if step is not generate_data else []
    with pytest.raises(SystemExit):
        step.main([*options, "--output", str(tmp_path / "out"), "--dry_run", str(tmp_path / "published")])
    assert "required: --push_to_hub" in capsys.readouterr().err and not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["blocks", "org/my blocks", "org/team/blocks", "https://huggingface.co/org/blocks"])
def test_what_cannot_name_a_data_set_is_refused_before_any_work(name, tmp_path, capsys):
    with pytest.raises(SystemExit):
        sequence_packing.main(["--input", "none", "--output", str(tmp_path / "out"), "--push_to_hub", name])
    assert "argument --push_to_hub" in capsys.readouterr().err and not any(tmp_path.iterdir())


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
    for name in (".lock", ".partial/rest", "notes.txt", "manifest.json", "train-00000-of-00001.safetensors"):
        (features / name).write_text("{}")
    publish("features", features, "org/features", {}, dry(folder))
    (folder / "manifest.json").write_text("edited")  # a copy's own
    assert (features / "manifest.json").read_text() == "{}"
    assert {file.name for file in folder.rglob("*")} == {
        "README.md",
        "manifest.json",
        "train-00000-of-00001.safetensors",
    }


def test_a_dry_run_without_a_folder_publishes_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit):
        options = [
            "--input",
            "none",
            "--output",
            str(tmp_path / "out"),
            "--push_to_hub",
            "org/blocks",
            "--dry_run",
            "",
        ]
        sequence_packing.main(options)
    assert "--dry_run: names no folder" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["published", "data/published"])
def test_a_dry_run_into_the_output_itself_is_refused(place, tmp_path):
    blocks = some_features(tmp_path / "blocks", 1)
    with pytest.raises(ValueError, match="lies in .*blocks"):
        publish("features", blocks, "org/features", {}, dry(blocks / place))
    assert {file.name for file in blocks.rglob("*")} == {"manifest.json", "train-00000-of-00001.safetensors"}


@pytest.mark.parametrize("links", [True, False])
def test_an_upload_has_what_a_dry_run_has(links, tmp_path, monkeypatch):
    """With a stand-in for the Hub, which takes note of what it is sent."""
    features, sent = tmp_path / "features", {}
    features.mkdir()
    (features / "manifest.json").write_text("{}")
    monkeypatch.setattr("data.hub.HfApi.create_repo", lambda self, repo_id, **options: f"made/{repo_id}")

    def upload_folder(self, repo_id, folder_path, repo_type, delete_patterns):
        sent.update({file.name: file.read_text() for file in Path(folder_path).iterdir()})

    def no_link(source, copy):
        raise OSError("no links here")

    monkeypatch.setattr("data.hub.HfApi.upload_folder", upload_folder)
    if not links:
        monkeypatch.setattr("data.hub.os.link", no_link)
    (features / "README.md").write_text("My notes.")
    assert publish("features", features, "org/f", {}, dry(None)) == "made/org/f"
    assert (features / "README.md").read_text() == "My notes." and "features to train" in sent["README.md"]
    publish("features", features, "org/f", {}, dry(tmp_path / "published"))
    assert sent == {file.name: file.read_text() for file in (tmp_path / "published").iterdir()}
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("tmp")] == []


PUBLISH = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from data.hub import publish
kind, output, *names = sys.argv[1:]
manifest = Path(f"{output}.manifest.json") if kind == "conversations" else Path(output, "manifest.json")
for name in names:
    repo_id, _, private = name.partition(" ")
    args = SimpleNamespace(dry_run=None, license="mit", private=private == "--private")
    try:
        print(publish(kind, output, repo_id, json.loads(manifest.read_text()), args))
    except OSError as error:
        print("error:", error)
"""
PACK = """
import json, sys
from datasets import load_dataset
from data.sequence_packing import main
for options in json.loads(sys.argv[1]):
    main(options)
for side, blocks in load_dataset("org/blocks").items():
    blocks.to_json(f"{sys.argv[2]}/{side}.jsonl")
"""
READ = """
import sys
from data.conversations import read_rows
for source in sys.argv[1:]:
    try:
        print(len(list(read_rows(source))))
    except (OSError, ValueError) as error:
        print("error:", error)
"""
PIPELINE = {"HF_HUB_DISABLE_XET": None}  # the upload that users have, of files that are sent inline


def some_features(folder, shards, text="{}"):
    folder.mkdir()
    for name in ("manifest.json", *(f"train-{i:05}-of-{shards:05}.safetensors" for i in range(shards))):
        (folder / name).write_text(text)
    return folder


def test_what_a_step_publishes_the_next_one_reads(hub, tmp_path, own_cache):
    rows = rows_of(40)
    for i, row in enumerate(rows[:9]):  # of several types, as a column of Arrow cannot hold them
        call = {"name": "get_tide", "arguments": {"at": ["Oban", i, {"day": "2026-01-01"}][i % 3]}}
        row["messages"][1]["tool_calls"] = [CALL | {"function": call}]
        row |= {"tools": [TOOL], "resp_ids": [1, 2]}
    chats = write(tmp_path, rows)
    (tmp_path / "chats.jsonl.manifest.json").write_text("{}")
    ran = ask(hub, tmp_path, PUBLISH, "conversations", chats, "org/chats")
    assert ran.stdout == f"{hub.endpoint}/datasets/org/chats\n"
    assert published(hub, "org/chats")["data/train.jsonl"] == chats.read_bytes() and TOKEN in hub.tokens

    chatml(TOOLS).save_pretrained(tmp_path / "tokenizer")
    options = {"tokenizer": tmp_path / "tokenizer", "max_seq_len": 512, "eval_fraction": 0.3}
    options = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    sources = [str(chats), "hf://datasets/org/chats/data/train.jsonl", "org/chats"]
    runs = [["--input", source, "--output", str(tmp_path / f"{i}"), *options] for i, source in enumerate(sources)]
    runs[1] += ["--push_to_hub", "org/blocks", "--license", "mit"]
    runs += [[*runs[1], "--dry_run", str(tmp_path / "dry")]]
    ran = ask(hub, tmp_path, PACK, json.dumps(runs), tmp_path)
    assert f"published: {hub.endpoint}/datasets/org/blocks\n" in ran.stdout, ran.stderr
    assert published(hub, "org/blocks") == contents(tmp_path / "dry")
    local, *others = [json.loads((tmp_path / f"{i}/manifest.json").read_text()) for i in range(3)]
    assert local["conversations"]["read"] == 40 and local["train"]["blocks"] > local["eval"]["blocks"] > 2
    for i, other in enumerate(others, start=1):
        assert [other[name] for name in ("conversations", "train", "eval")] == [
            local[name] for name in ("conversations", "train", "eval")
        ]
        for side in ("train", "eval"):
            blocks = load_blocks(tmp_path / f"{i}")[side].to_list()
            assert blocks == load_blocks(tmp_path / "0")[side].to_list()
            assert blocks == [row for _, row in read_rows(tmp_path / f"{side}.jsonl")]


def test_published_features_are_trained_on_once_they_are_downloaded(hub, tmp_path, features):
    ask(hub, tmp_path, PUBLISH, "features", features, "org/features")
    download = "from huggingface_hub import snapshot_download as get; print(get('org/features', repo_type='dataset'))"
    folder = ask(hub, tmp_path, download).stdout.strip()
    assert_same(folder, features)
    for split in ("train", "eval"):
        assert [block["seq_lengths"] for block in FeatureShards(folder, split=split)] == [
            block["seq_lengths"] for block in FeatureShards(features, split=split)
        ]


@pytest.mark.parametrize("transfer", ["lfs", "pipeline"])
def test_pushing_again_replaces_what_was_there(transfer, hub, tmp_path):
    if transfer == "pipeline":
        hub.lfs = ()
    environment = PIPELINE if transfer == "pipeline" else {}
    first, second = some_features(tmp_path / "first", 3), some_features(tmp_path / "second", 2, '{"new": 1}')
    ask(hub, tmp_path, PUBLISH, "features", first, "org/features", **environment)
    assert published(hub, "org/features").keys() == {"README.md", *contents(first)}
    hub.commit("org/features", hub.files("org/features") | {"notes.txt": b"by hand"})
    ran = ask(hub, tmp_path, PUBLISH, "features", second, "org/features", "org/features", **environment)
    assert ran.stdout == f"{hub.endpoint}/datasets/org/features\n" * 2, ran.stderr
    publish("features", second, "org/features", {"new": 1}, dry(tmp_path / "dry"))
    assert published(hub, "org/features") == contents(tmp_path / "dry") | {"notes.txt": b"by hand"}
    assert len(history(hub)) == 4  # made, pushed, by hand, pushed: the last changed nothing


@pytest.mark.parametrize(
    "failing, environment, told",
    [
        ({"/commit/": 403}, PIPELINE, "403 Forbidden"),
        ({"/commit/": 500}, {}, "500"),
        ({"/storage/": 403}, {}, "Error while uploading 'train-00000-of-00001.safetensors'"),
        ({"/repos/create": 403}, {}, "403 Forbidden"),
        ({}, {"HF_TOKEN": None}, "401"),
        ({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "refused"),
    ],
)
def test_a_failing_upload_says_what_to_do_and_leaves_the_output(failing, environment, told, hub, tmp_path):
    features = some_features(tmp_path / "features", 1)
    hub.failing, before = failing, contents(features)
    hub.lfs = () if environment == PIPELINE else hub.lfs
    said = ask(hub, tmp_path, PUBLISH, "features", features, "org/features", **environment).stdout
    assert said.startswith(f"error: {features} is whole, but org/features was not published: ")
    assert told in said and "hf auth login" in said
    assert contents(features) == before and {file.name for file in tmp_path.iterdir()} <= {"features", "home"}
    assert all(files.keys() == {".gitattributes"} for _, files in history(hub))


def test_what_is_to_be_private_is_never_published_openly(hub, tmp_path):
    features, hub.default = some_features(tmp_path / "features", 1), "private"  # as an organization may choose
    hub.commit("org/open", {})
    names = ["org/chosen", "org/chosen --private", "org/asked --private", "org/open --private"]
    told = ask(hub, tmp_path, PUBLISH, "features", features, *names).stdout
    assert told.count(f"{hub.endpoint}/datasets/") == 3 and "not published: it is there already, and public" in told
    assert {name: (repo["private"], len(repo["commits"])) for name, repo in hub.repos.items()} == {
        "org/open": (False, 1),
        "org/chosen": (True, 2),
        "org/asked": (True, 2),
    }


def test_what_cannot_be_read_from_the_hub_is_told(hub, tmp_path):
    long = b'{"messages": "%s"}\n' % (b"a" * 10**6)
    hub.commit("org/chats", {"data/long.jsonl": long * 12}, private=True)  # more than is fetched at a time
    hub.failing["/org/lost"] = None
    paths = [f"hf://datasets/org/{path}.jsonl" for path in ("chats/data/long", "chats/data/train", "none/a", "lost/a")]
    told = ask(hub, tmp_path, READ, *paths, "org/none").stdout.splitlines()
    assert len(told) == 5 and told[0] == "12" and all(re.match("error: .*org/", line) for line in told[1:])
    assert told[3].startswith(f"error: {paths[3]} could not be read: ")
