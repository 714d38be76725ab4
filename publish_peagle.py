"""Publish a drafter on the Hub, and a Space that shows it; with --dry_run only lay out the folder that would be published.

    python publish_peagle.py drafter --drafter out --push_to_hub org/name
    python publish_peagle.py space --drafter org/name --push_to_hub org/name-demo

The drafter of this folder is published with the whole repository, whose README is its card; any other one with the code that
transformers needs and a card made here. The token comes from `hf auth login` or the environment, and goes nowhere else.
"""

import argparse
import ast
import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData, SpaceCard, SpaceCardData
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig

from card_blocks_peagle import model_index, origin, ways_block
from card_peagle import read
from configuration_peagle import PEagleBackboneConfig
from data.hub import add_hub_arguments, hub_id, public_name, send
from modeling_peagle import Drafter, PEagleModel
from modeling_peagle_backbone import PEagleBackboneModel


ROOT = Path(__file__).resolve().parent
# What the repository consists of; what else lies in its folder, such as somebody's chats, is nobody's business. See
# [`repository_files`].
REPOSITORY = (
    "*.py *.sh README.md LICENSE requirements.txt pyproject.toml .gitignore config.json model.safetensors".split()
)
REPOSITORY += "markov_head/* results/* results/*/* accelerate_configs/*.yaml data/prompts.jsonl metrics/*/*.py".split()
REPOSITORY += [f"{folder}/*.py" for folder in ("benchmarks", "custom_generate", "data", "tests")]
# What an earlier push may have left and readers would take for ours: vLLM reads all weights that it finds. `*` is also `/`.
REPLACED = ["*.py", "*.safetensors", "*.safetensors.index.json"]
# What damaged JSON, CSV and commands give.
UNREADABLE = (
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RecursionError,
    UnicodeDecodeError,
    json.JSONDecodeError,
)
REQUIREMENTS = dict(re.findall(r"^([\w-]+)(\S*)", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE))

CARD = """# {name}

A drafter for [{target}](https://huggingface.co/{target}): it proposes several tokens at a time by
[P-EAGLE](https://huggingface.co/papers/2602.01469), the target checks them all in one forward, and the output is what the
target would have written alone.

## Usage

With `transformers{transformers}`. The tokenizer is the target's.

```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
target = AutoModelForCausalLM.from_pretrained("{target}")
drafter = AutoModel.from_pretrained("{repo_id}", trust_remote_code=True)
drafter.attach(target, tokenizer)

chat = [{{"role": "user", "content": "Name three fruits."}}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```

Without attaching, `target.generate(**inputs, custom_generate="{repo_id}", assistant_model=drafter, trust_remote_code=True)`
does the same. `revision="<commit>"`, in `from_pretrained` and beside `custom_generate`, keeps you to the weights and the code
that you have read.

## The drafter

{layers}, {parameters:,} parameters; trained to draft up to {config.num_depths} tokens a round, {way}, out of
{config.draft_vocab_size:,} of the target's {config.vocab_size:,} tokens.

{training}

{results}## Licence

That of the weights is named above; the code is under the MIT licence (`LICENSE`).
"""
SPACE = """# {title}

Plain decoding of [{target}](https://huggingface.co/{target}) beside decoding with the drafter
[{drafter}](https://huggingface.co/{drafter}): the same output, in fewer forwards. The variables `DRAFTER` and `TARGET` in the
settings name another pair; for private and gated models add the secret `HF_TOKEN` there.
"""


def without_folders(command: str) -> str:
    """A command line that names files, but not where they lie on this machine."""
    place = r"""(^|[=,@"'])(?:file://)?(?:~|/|\w:\\|\\\\)[^,"']*[/\\](?=.)"""
    return shlex.join(re.sub(place, r"\1", word) for word in shlex.split(command))


def load(folder: str) -> Drafter:
    """The drafter in a folder, with the code of this repository and not that which was saved with it.

    Raises:
        FileNotFoundError, OSError, ValueError: There is none, or it is not whole.
    """
    if not Path(folder, "config.json").is_file():
        raise FileNotFoundError(f"There is no drafter in {folder}: name a folder that train_peagle.py made.")
    config, _ = PreTrainedConfig.get_config_dict(folder)
    backbone = config.get("model_type") == PEagleBackboneConfig.model_type
    return (PEagleBackboneModel if backbone else PEagleModel).from_pretrained(folder)


def target_of(config: dict, target: str | None) -> str:
    """The Hub id of the target, given what a drafter's `config.json` says and the flag."""
    if not (target or config.get("target_name_or_path")):
        raise ValueError("The drafter does not say what its target is: name it with --target org/name.")
    named = target or public_name(config["target_name_or_path"])
    try:
        return hub_id(named)
    except ValueError as error:
        raise ValueError(
            f"The drafter's target is called {named!r}, which is no Hub id: name it with --target org/name."
        ) from error


def read_report(path: str) -> tuple[list, str]:
    """The results in a report of `evaluate_peagle.py`: for the front matter, and as Markdown."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no report {path}: evaluate_peagle.py --output writes one.")
    try:
        report = read(Path(path))
        report["settings"]["command"] = without_folders(report["settings"]["command"])
        return model_index(report, Path(path).stem), ways_block(report)
    except UNREADABLE as error:
        raise ValueError(f"{path} is no report of evaluate_peagle.py: its --output writes one ({error!r}).") from error


def training_of(folder: Path) -> str:
    """How a drafter was trained, as far as the learning curve beside it tells."""
    curve = [folder / f"learning_curve.{suffix}" for suffix in ("csv", "json")]
    if not all(file.is_file() for file in curve):
        return "How it was trained was not recorded."
    try:
        last = [*csv.DictReader(curve[0].read_text().splitlines())][-1]
        made = json.loads(curve[1].read_text())
        made["settings"]["command"] = without_folders(made["settings"]["command"])
        tokens, tau = int(float(last["num_input_tokens_seen"])), float(last["eval_tau"])
    except (*UNREADABLE, ValueError) as error:
        words = f"{curve[0]} or {curve[1].name} is damaged ({error!r}): delete both, and the card says nothing of the training."
        raise ValueError(words) from error
    return f"Its last evaluation, after {tokens:,} training tokens, gave tau {tau:.2f} on held-out prompts:\n\n{origin(made)}"


def lay_out_drafter(args, folder: Path) -> None:
    """Fill ``folder`` with exactly what is published of a drafter."""
    if Path(args.drafter).resolve() == ROOT:
        if args.report or args.target:
            raise ValueError("The card of this folder's own drafter is README.md: leave out --report and --target.")
        load(args.drafter)  # it is whole
        return copy_files(repository_files(), folder)
    indices, blocks = zip(*map(read_report, args.report)) if args.report else ((), ())
    drafter, name = load(args.drafter), args.push_to_hub.split("/")[1]
    config = drafter.config
    config.target_name_or_path = target_of(config.to_dict(), args.target)
    body, source = (
        (config.lm_config, " of a pretrained model") if isinstance(drafter, PEagleBackboneModel) else (config, "")
    )
    drafter.save_pretrained(folder)  # with the modules that it imports
    copy_files({ROOT / "custom_generate/generate.py", ROOT / "LICENSE"}, folder)
    data = ModelCardData(
        base_model=config.target_name_or_path,
        license=args.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "eagle3", "peagle", "draft-model", "custom_code", "custom_generate"],
        model_name=name if indices else None,
        eval_results=sum(indices, []) or None,
    )
    text = CARD.format(
        name=name,
        repo_id=args.push_to_hub,
        target=config.target_name_or_path,
        transformers=REQUIREMENTS["transformers"],
        config=config,
        layers=f"{body.num_hidden_layers} {body.model_type} layer{'s' * (body.num_hidden_layers > 1)}{source}",
        parameters=drafter.num_parameters(),
        way="all in one forward" if config.parallel_drafting else "one after the other",
        training=training_of(Path(args.drafter)),
        results="".join(f"## Results\n\n{block}\n\n" for block in blocks),
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(folder / "README.md")


def repository_files() -> set[Path]:
    """The files of the repository: those of `REPOSITORY`, and where git keeps it only what git knows; it tells of the others."""
    files = {file for pattern in REPOSITORY for file in ROOT.glob(pattern) if file.is_file() and not file.is_symlink()}
    files -= {file for file in files if file.name.startswith(".") and file.name != ".gitignore"}
    git = subprocess.run("git ls-files -z", shell=True, cwd=ROOT, capture_output=True, text=True)
    if git.returncode or not (ROOT / ".git").exists():  # downloaded from the Hub
        return files
    known = {ROOT / name for name in git.stdout.split("\0")}
    if files - known:
        names = sorted(str(file.relative_to(ROOT)) for file in files - known)
        print(f"left out, as they are not under version control: {', '.join(names)}")
    return files & known


def copy_files(files: set[Path], folder: Path) -> None:
    """Copy files of this repository to their places in another folder."""
    for file in files:
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def imports_of(file: Path, files: set[Path]) -> set[str]:
    """The first names of what a module imports, directly or by others of this repository; these are added to `files`."""
    files.add(file)
    names, found = set(), set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):  # with a dot before it, too: all modules of the root lie side by side
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    for name in names:
        parts = name.split(".")
        for path in (ROOT.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)):
            found |= {module for module in (path.with_suffix(".py"), path / "__init__.py") if module.is_file()}
    return {name.split(".")[0] for name in names}.union(*(imports_of(module, files) for module in found - files))


def lay_out_space(args, folder: Path) -> None:
    """Fill ``folder`` with exactly what is published of a Space: the page, what it imports, and which pair it shows."""
    config = {}
    if not args.target:
        try:
            config, _ = PreTrainedConfig.get_config_dict(args.drafter)
        except OSError as error:
            raise OSError(
                f"{args.drafter} could not be read from the Hub, so its target is not known: publish the drafter first, or name "
                f"the target with --target org/name ({error})"
            ) from error
    target = target_of(config, args.target)
    files = {ROOT / "LICENSE"}
    imported = imports_of(ROOT / "app.py", files)
    copy_files(files, folder)
    # Of Gradio the front matter tells the version, of torch the hardware of the Space.
    needed = {name: pin for name, pin in REQUIREMENTS.items() if name.replace("-", "_") in imported - {"gradio"}}
    (folder / "requirements.txt").write_text(
        "".join(f"{name}{pin}\n" for name, pin in (needed | {"torch": ""}).items())
    )
    title = f"P-EAGLE: {target.split('/')[1]}"
    data = SpaceCardData(
        title=title,
        emoji="🦅",
        colorFrom="indigo",
        colorTo="green",
        sdk="gradio",
        sdk_version=version("gradio"),
        python_version="3.12.12",
        app_file="app.py",
        short_description="Several tokens per forward, the same output",
        models=[args.drafter, target],  # app.py reads them here
        license=args.license,
    )
    text = SPACE.format(title=title, target=target, drafter=args.drafter)
    SpaceCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(folder / "README.md")


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    drafter = kinds.add_parser("drafter", help="weights, code and card of a drafter")
    drafter.add_argument("--drafter", default=str(ROOT), metavar="FOLDER", help="that of this folder if unset")
    drafter.add_argument(
        "--report", nargs="+", default=[], metavar="JSON", help="of evaluate_peagle.py --output, for the card"
    )
    space = kinds.add_parser("space", help="the page of app.py, for a drafter on the Hub")
    space.add_argument("--drafter", required=True, type=hub_id, metavar="ORG/NAME", help="the drafter that is shown")
    for kind, what in ((drafter, "model"), (space, "Space")):
        kind.add_argument("--target", type=hub_id, metavar="ORG/NAME", help="what the drafter's config names if unset")
        add_hub_arguments(kind, what, required=True)
    space.set_defaults(license="mit")
    args = parser.parse_args(argv)
    lay_out, repo = lay_out_drafter, {"repo_type": "model"}
    if args.kind == "space":
        lay_out, repo = lay_out_space, {"repo_type": "space", "space_sdk": "gradio"}
    print("published:", send(partial(lay_out, args), args.push_to_hub, args, replaced=REPLACED, **repo))


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, StrictDataclassError, SafetensorError) as error:
        sys.exit(f"error: {error}")
