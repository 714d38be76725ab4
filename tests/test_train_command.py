"""`accelerate launch train_peagle.py` from a conversations file to a drafter that loads and decodes."""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from chats import CHATML, make_tokenizer
from conftest import ROOT, SIZES
from safetensors.torch import load_file
from test_distributed import launch as launch_processes
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

import train_peagle
from arguments_peagle import PEagleArguments, parse_arguments
from data.extract_features import extract_features
from data.sequence_packing import pack_conversations
from modeling_peagle import PEagleModel
from target_peagle import load_target
from train_peagle import main
from trainer_peagle import PEagleTrainer


WORDS = "red green blue seven birds sing over the long river at night".split()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A tiny target folder, and a file of 24 chats of which two rows are bad."""
    folder = tmp_path_factory.mktemp("train")
    specials = ["<|im_start|>", "<|im_end|>", "<|reserved_0|>"]
    tokenizer = make_tokenizer(CHATML, specials, eos="<|im_end|>")
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": len(tokenizer) + 5, "eos_token_id": tokenizer.eos_token_id}
    target = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, max_position_embeddings=512))
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    rows = []
    for i in range(24):
        words = [WORDS[(i * step) % len(WORDS)] for step in (1, 3, 5)]
        turns = [("user", " ".join(words)), ("assistant", " ".join(reversed(words)) + f" {i}.")]
        rows.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    (folder / "chats.jsonl").write_text("\n".join([*rows, '{"messages": []}', '{"messages": [{"ro']) + "\n")
    return folder, tokenizer


def launch(*arguments, **options):
    command = [sys.executable, "-m", "accelerate.commands.launch", str(ROOT / "train_peagle.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, **options)


def test_the_command_trains_a_drafter_that_loads_and_decodes(workplace, tmp_path):
    folder, tokenizer = workplace
    (tmp_path / "recipe.yaml").write_text(f"train_file: {folder / 'chats.jsonl'}\nlearning_rate: 0.002\n")
    run = launch(
        *("--config", tmp_path / "recipe.yaml", "--target_model", folder / "target", "--output_dir", tmp_path / "out"),
        *("--max_seq_len", 128, "--draft_vocab_size", 64, "--max_steps", 6, "--save_every", 3, "--logging_steps", 2),
        *("--eval_fraction", 0.2, "--use_cpu", "true", "--keep_features", "true"),
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    said = run.stdout
    assert "chats.jsonl: 26 read; " in said and "skipped: no messages" in said and "skipped: invalid JSON" in said
    assert "⟦" in said and "covers" in said and "tokens an epoch" in said and "held-out conversations:" in said

    target = LlamaForCausalLM.from_pretrained(folder / "target")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "birds sing"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    plain = target.generate(**prompt, max_new_tokens=20, do_sample=False)
    for name, dtype in (("out", torch.float16), ("out/checkpoint-3", torch.float32)):
        drafter = AutoModel.from_pretrained(tmp_path / name, trust_remote_code=True)
        assert drafter.dtype == dtype
        assert drafter.config.mask_token_id == tokenizer.convert_tokens_to_ids("<|reserved_0|>")
        assert len(drafter.config.draft_temperatures or []) == (drafter.config.num_depths if name == "out" else 0)
        with drafter.attach(target, tokenizer):
            out = target.generate(**prompt, assistant_model=drafter, max_new_tokens=20, do_sample=False)
        assert torch.equal(out, plain)
    history = json.loads((tmp_path / "out/checkpoint-6/trainer_state.json").read_text())["log_history"]
    assert {"loss", "accuracy_depth_0", "accuracy_depth_4"} <= history[0].keys()


def test_a_file_of_which_nothing_is_held_out_trains(workplace, tmp_path):
    folder, _ = workplace
    run = launch(
        *(
            "--train_file",
            folder / "chats.jsonl",
            "--target_model",
            folder / "target",
            "--output_dir",
            tmp_path / "out",
        ),
        *("--max_seq_len", 128, "--draft_vocab_size", 64, "--max_steps", 1, "--eval_fraction", 0, "--use_cpu", "true"),
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert (tmp_path / "out/model.safetensors").is_file() and "held-out conversations:" not in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_file": None}, "--train_file chats.jsonl"),
        ({"train_dir": "blocks"}, "Name what to train on"),
        ({"embeddings": "some"}, "borrowed, mask_row, trained"),
        ({"loss": "mse"}, "kl, ce, lk"),
        ({"depth_weights": "some"}, "uniform, decay, survival"),
        ({"save_dtype": "int8"}, "float32, bfloat16 or float16"),
        ({"eval_fraction": 1}, "--eval_fraction is 1"),
        ({"cod_ratio": 0}, "--cod_ratio is 0"),
        ({"cod_floor": 1.5}, "--cod_floor 1.5"),
        ({"remove_unused_columns": True}, "--remove_unused_columns"),
        ({"push_to_hub": True}, "publish_peagle.py drafter --drafter"),
        ({"neftune_noise_alpha": 5}, "--neftune_noise_alpha"),
        ({"train_file": "a", "feature_dir": "b"}, "only one of them"),
        ({"num_depths": 2}, "--speculation_depth is 4, but --num_depths trains 2"),
        ({"feature_noise": float("nan")}, "--feature_noise is nan"),
        ({"max_anchors": 0}, "--max_anchors is 0"),
        ({"markov_rank": -1}, "--markov_rank is -1"),
        ({"max_minutes": 0}, "--max_minutes is 0"),
        ({"dataloader_persistent_workers": True, "dataloader_num_workers": 1}, "--dataloader_persistent_workers"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PEagleArguments(**{"train_file": "chats.jsonl", "output_dir": str(tmp_path), "use_cpu": True} | arguments)


def arguments_for(workplace, output_dir, **changes):
    folder, _ = workplace
    defaults = {
        **{"train_file": str(folder / "chats.jsonl"), "target_model": str(folder / "target"), "use_cpu": True},
        **{"output_dir": str(output_dir), "max_seq_len": 128, "draft_vocab_size": 64, "max_steps": 1},
        **{"eval_fraction": 0, "disable_tqdm": True, "save_steps": 1},
    }
    return PEagleArguments(**defaults | changes)


def test_what_only_the_data_shows_to_be_wrong_is_named(workplace, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        main(arguments_for(workplace, tmp_path, train_file="nowhere.jsonl"))
    end = workplace[1].eos_token_id
    with pytest.raises(ValueError, match=f"--mask_token_id {end} occurs in the chats"):
        main(arguments_for(workplace, tmp_path, mask_token_id=end))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="Nothing is supervised"):
        read = train_peagle.read_blocks

        def silent(*args):
            return {
                side: blocks.map(lambda block: {"loss_mask": [0] * len(block["input_ids"])})
                for side, blocks in read(*args).items()
            }

        patch.setattr(train_peagle, "read_blocks", silent)
        main(arguments_for(workplace, tmp_path))
    with pytest.raises(ValueError, match="no longer finite at step"):
        main(arguments_for(workplace, tmp_path / "wild", learning_rate=1e30, max_steps=9, warmup_steps=0))
    with pytest.raises(ValueError, match="--dataloader_drop_last"):
        main(arguments_for(workplace, tmp_path, per_device_train_batch_size=99, dataloader_drop_last=True))


def test_training_is_resumed_only_with_the_same_drafter(workplace, tmp_path):
    with pytest.raises(ValueError, match="no whole checkpoint in"):
        main(arguments_for(workplace, tmp_path, resume_from_checkpoint="true"))
    main(arguments_for(workplace, tmp_path))
    with pytest.raises(ValueError, match="num_hidden_layers 1 there and 2 here"):
        main(arguments_for(workplace, tmp_path, resume_from_checkpoint="true", num_layers=2, max_steps=2))
    main(arguments_for(workplace, tmp_path, resume_from_checkpoint="true", max_steps=2))
    state = json.loads((tmp_path / "checkpoint-2/trainer_state.json").read_text())
    assert state["global_step"] == 2
    other = tmp_path / "other.jsonl"
    rows = [json.loads(row) for row in (workplace[0] / "chats.jsonl").read_text().splitlines()[:24]]
    for row in rows:
        row["messages"][-1]["content"] = "mmm nnn ooo ppp"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="the draft vocabulary of .*checkpoint-2 is not that of this data"):
        main(arguments_for(workplace, tmp_path, resume_from_checkpoint="true", train_file=str(other), max_steps=3))


def test_training_starts_from_another_drafter_whatever_its_draft_vocabulary(workplace, tmp_path):
    first = {"markov_rank": 4, "mask_token_id": len(workplace[1]) + 1, "learning_rate": 0.01, "save_dtype": "float32"}
    main(arguments_for(workplace, tmp_path / "a", max_steps=4, **first, warmup_steps=0))
    start = {"markov_rank": 4, "learning_rate": 0.0, "init_from_drafter": str(tmp_path / "a"), "save_dtype": "float32"}
    main(arguments_for(workplace, tmp_path / "b", **start, draft_vocab_size=40))
    main(arguments_for(workplace, tmp_path / "c", markov_rank=4, learning_rate=0.0, save_dtype="float32"))
    a, b, c = (PEagleModel.from_pretrained(tmp_path / name) for name in "abc")
    assert a.config.mask_token_id == b.config.mask_token_id != c.config.mask_token_id
    rows = torch.searchsorted(a.draft_ids(), b.draft_ids())
    assert torch.equal(a.draft_ids()[rows], b.draft_ids()) and len(rows) == 40
    left, right, fresh = a.state_dict(), b.state_dict(), c.state_dict()
    for name in left.keys() - {"d2t"}:
        by_token = name.startswith(("lm_head", "markov_head"))
        assert torch.equal(left[name][rows] if by_token else left[name], right[name]), name
    assert not torch.equal(left["fc.weight"], fresh["fc.weight"]) and right["markov_head.next.weight"].any()
    larger = start | {"init_from_drafter": str(tmp_path / "b")}  # what the smaller one lacks gets no bias, and gives none
    main(arguments_for(workplace, tmp_path / "larger", **larger))
    wider = PEagleModel.from_pretrained(tmp_path / "larger")
    new = ~torch.isin(wider.draft_ids(), b.draft_ids())
    assert new.any() and not wider.markov_head(new.nonzero()[:, 0]).any() and wider.markov_head((~new).nonzero()[:, 0]).any()
    assert not wider.markov_head.next.weight[new].any()
    with pytest.raises(ValueError, match="they differ in layers"):
        main(arguments_for(workplace, tmp_path / "d", **start, num_layers=2))
    config = json.loads((tmp_path / "a/config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]  # no tensor's shape would tell
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="they differ in eagle_aux_hidden_state_layer_ids"):
        main(arguments_for(workplace, tmp_path / "d", **start))
    with pytest.raises(OSError, match="nowhere"):
        main(arguments_for(workplace, tmp_path / "e", init_from_drafter=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="two starts"):
        arguments_for(workplace, tmp_path / "f", **start, init_from_target=True)


def test_a_run_that_has_all_its_steps_is_only_saved(workplace, tmp_path):
    main(arguments_for(workplace, tmp_path, max_steps=2, eval_fraction=0.2))
    saved = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    main(arguments_for(workplace, tmp_path, max_steps=2, eval_fraction=0.2, resume_from_checkpoint="true"))
    again = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())
    assert not (tmp_path / "checkpoint-3").exists()


def test_stored_signals_train_the_drafter_that_the_target_itself_would(workplace, tmp_path):
    folder, tokenizer = workplace
    blocks, features = tmp_path / "blocks", tmp_path / "features"
    stops = [tokenizer.eos_token_id]
    pack_conversations(
        folder / "chats.jsonl", blocks, tokenizer, max_seq_len=128, stop_token_ids=stops, progress=False
    )
    target, _ = load_target(str(folder / "target"))
    extract_features(target, tokenizer, blocks, features, dtype="float32", shard_size=10**5, progress=False)
    # One shard at a time is shuffled in another order than blocks in memory: the order is what has to differ.
    options = {"train_file": None, "max_steps": 8, "save_steps": 8}
    weights = []
    for source in ({"train_dir": str(blocks)}, {"feature_dir": [str(features)], "shard_cache_size": 99}):
        output = tmp_path / next(iter(source))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                PEagleTrainer, "_get_train_sampler", lambda self, dataset=None: range(len(self.train_dataset))
            )
            main(arguments_for(workplace, output, **options, **source))
        weights.append(load_file(output / "checkpoint-8/model.safetensors"))
    for name, trained in weights[0].items():
        torch.testing.assert_close(weights[1][name], trained, atol=1e-5, rtol=1e-4)
    main(arguments_for(workplace, tmp_path / "shuffled", **options, feature_dir=str(features), shard_cache_size=1))
    shuffled = load_file(tmp_path / "shuffled/checkpoint-8/model.safetensors")
    assert not torch.allclose(shuffled["fc.weight"], weights[0]["fc.weight"], atol=1e-5)


def test_a_recipe_takes_every_name_that_the_command_line_takes(tmp_path, monkeypatch):
    def parse(text, *arguments):
        (tmp_path / "recipe.yaml").write_text(f"train_file: chats.jsonl\nuse_cpu: true\n{text}")
        monkeypatch.setattr(sys, "argv", ["train_peagle.py", "--config", str(tmp_path / "recipe.yaml"), *arguments])
        return parse_arguments()

    args = parse("batch_size: 3\nnum_epochs: 2\nsave_every: 7\nlearning_rate: 0.002\n", "--save_every", "9")
    assert (args.per_device_train_batch_size, args.num_train_epochs, args.save_steps) == (3, 2, 9)
    assert args.learning_rate == 0.002 and args.eval_steps == 9
    (tmp_path / "recipe.yaml").write_text("feature_dir: features\nuse_cpu: true\n")
    monkeypatch.setattr(sys, "argv", ["train_peagle.py", "--config", str(tmp_path / "recipe.yaml")])
    assert parse_arguments().feature_dir == ["features"]
    monkeypatch.setattr(sys, "argv", ["train_peagle.py", "--feature_dir", "one", "another", "--use_cpu"])
    assert parse_arguments().feature_dir == ["one", "another"]
    with pytest.raises(ValueError, match="sets segment_lenght, which no option is called"):
        parse("segment_lenght: 64\n")


@pytest.mark.slow
def test_the_command_spreads_a_drafter_as_the_configuration_says(workplace, tmp_path):
    """What it saves in the end, gathered from both processes, is what data parallel training saves."""
    folder, _ = workplace
    for name in ("ddp", "fsdp2"):
        arguments = ("--target_model", folder / "target", "--train_file", folder / "chats.jsonl", "--markov_rank", 4)
        arguments += ("--output_dir", tmp_path / name / "out", "--max_seq_len", 128, "--draft_vocab_size", 64)
        arguments += ("--max_steps", 4, "--save_every", 2, "--eval_fraction", 0.2, "--use_cpu", "true", "--yes")
        launch_processes(tmp_path / name, 2, "command", f"{name}.yaml", *arguments)
    assert (tmp_path / "fsdp2/out/checkpoint-4/pytorch_model_fsdp.bin").exists()  # it was spread
    for file in ("model.safetensors", "markov_head/model.safetensors"):
        one, other = (load_file(tmp_path / name / "out" / file) for name in ("ddp", "fsdp2"))
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, atol=1e-3, rtol=1e-3, msg=name)
    assert json.loads((tmp_path / "fsdp2/out/config.json").read_text())["auto_map"]["AutoModel"].startswith("modeling")


def test_the_steps_are_those_that_fit_into_the_time(workplace, tmp_path, monkeypatch, capsys):
    measured = train_peagle.measure_batch
    monkeypatch.setattr(train_peagle, "measure_batch", lambda trainer: (*measured(trainer)[:2], 6.0))
    options = {"max_steps": -1, "num_train_epochs": 50, "gradient_accumulation_steps": 2, "save_steps": 2}

    def state(folder, number):
        return json.loads((folder / f"checkpoint-{number}/trainer_state.json").read_text())

    main(arguments_for(workplace, tmp_path / "a", **options, max_minutes=0.8))
    assert "4 updates of 2 x 1 batches" in capsys.readouterr().out  # 48 s at 12 s
    assert state(tmp_path / "a", 4)["max_steps"] == 4
    rates = [entry["learning_rate"] for entry in state(tmp_path / "a", 4)["log_history"] if "learning_rate" in entry]
    # A resumed run has the same schedule, whatever time it is given; a finished one takes no further step.
    shutil.rmtree(tmp_path / "a/checkpoint-4")
    resumed = options | {"max_minutes": 99, "resume_from_checkpoint": "true"}
    main(arguments_for(workplace, tmp_path / "a", **resumed))
    assert state(tmp_path / "a", 4)["max_steps"] == 4 and "2 updates done, 2 updates of" in capsys.readouterr().out
    assert rates == [
        entry["learning_rate"] for entry in state(tmp_path / "a", 4)["log_history"] if "learning_rate" in entry
    ]
    # No more than the epochs have, and one step at least.
    main(arguments_for(workplace, tmp_path / "b", **options | {"num_train_epochs": 1}, max_minutes=99))
    most = int(re.search(r"(\d+) updates of", capsys.readouterr().out)[1])
    assert 0 < most < 30 and (tmp_path / "b/model.safetensors").exists()
    main(arguments_for(workplace, tmp_path / "c", **options, max_minutes=0.01))
    assert "1 updates of 2 x 1" in capsys.readouterr().out


@pytest.fixture
def forwards(monkeypatch):
    """The target's forwards so far, in a list; by the clock of the measurements each takes a second, and all else no time."""
    count = [0]

    def load(*args, **kwargs):
        target, tokenizer = load_target(*args, **kwargs)
        target.register_forward_pre_hook(lambda *_: count.append(count.pop() + 1))
        return target, tokenizer

    monkeypatch.setattr(train_peagle, "load_target", load)
    monkeypatch.setattr(train_peagle, "time", SimpleNamespace(perf_counter=lambda: count[0]))
    return count


def test_steps_are_measured_with_the_targets_reading_although_its_outputs_are_kept(
    workplace, tmp_path, forwards, capsys
):
    options = {"max_steps": -1, "num_train_epochs": 50, "save_steps": 99, "keep_features": True}
    main(arguments_for(workplace, tmp_path, **options, max_minutes=5 / 60))
    assert "5 updates of" in capsys.readouterr().out


STRATEGIES = [
    ({"save_steps": 2, "max_steps": 5}, 4),
    ({"save_steps": 0.5, "max_steps": 5}, 3),
    ({"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2, "max_steps": -1}, 3),
    ({"eval_strategy": "no", "max_steps": 1}, 1),
]


@pytest.mark.parametrize(("options", "expected"), STRATEGIES)
def test_evaluations_are_counted_and_their_time_is_foretold(
    workplace, tmp_path, forwards, capsys, monkeypatch, options, expected
):
    evaluate, took = PEagleTrainer.evaluate, []

    def counted(*args, **kwargs):
        start = forwards[0]
        metrics = evaluate(*args, **kwargs)
        took.append(forwards[0] - start)
        return metrics

    monkeypatch.setattr(PEagleTrainer, "evaluate", counted)
    flags = {"eval_fraction": 0.3, "eval_prompts": 2, "eval_new_tokens": 4, "per_device_train_batch_size": 8}
    main(arguments_for(workplace, tmp_path, max_seq_len=64, **flags | options))
    said = re.search(r"about (\S+) for (\d+) evaluations?\n", capsys.readouterr().out)
    assert int(said[2]) == len(took) == expected
    hours, minutes, seconds = map(int, said[1].split(":"))
    # As many forwards as there were, or a few more where draft tokens were right.
    assert sum(took) <= 3600 * hours + 60 * minutes + seconds <= sum(took) + 4 * expected
    assert min(took) > 4  # the answers are among them
