"""Cost of a training step: `python benchmarks/training.py [step] [length] [shape] [ways] [--output file.json]`, all four if unnamed.

step    a step against the matrix products that it cannot do without
length  time and peak memory against the length of one conversation, in segments of 256; the last with the target
shape   time and peak memory against segment length, depths and layers
ways    a token's time with the target online, its outputs kept, and read from shards; and what of it is no step

Text and weights are random but for the target's: costs do not depend on them. But for ways, every line is a process of
its own.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tables import measure_tables, parser  # noqa: E402
from torch import nn  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from arguments_peagle import PEagleArguments  # noqa: E402
from configuration_peagle import PEagleConfig, default_layer_ids  # noqa: E402
from data.collator import PackingCollator  # noqa: E402
from data.extract_features import extract_features  # noqa: E402
from data.feature_shards import FeatureShards  # noqa: E402
from data.sequence_packing import load_blocks, pack_conversations  # noqa: E402
from environment_peagle import environment  # noqa: E402
from modeling_peagle import PEagleModel  # noqa: E402
from target_peagle import load_target  # noqa: E402
from train_peagle import freeze  # noqa: E402
from trainer_peagle import PEagleTrainer, TargetSignals  # noqa: E402


DRAFT_VOCABULARY = 6144


def build_trainer(target, tokenizer, *, depths=5, layers=1, keep=False, blocks=None, **options):
    """A trainer of the default pair."""
    target.config.max_position_embeddings = 2**17  # costs do not depend on what it makes of such lengths
    config = PEagleConfig.for_target(
        target,
        tokenizer,
        mask_token_id=16,
        num_hidden_layers=layers,
        draft_vocab_size=DRAFT_VOCABULARY,
        num_depths=depths,
        speculation_depth=min(4, depths),
        max_position_embeddings=2**17,
    )
    torch.manual_seed(0)
    drafter = PEagleModel.from_target(target, config, torch.arange(DRAFT_VOCABULARY))
    freeze(drafter, "borrowed")
    options |= {"train_file": "unused", "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    return PEagleTrainer(
        model=drafter,
        args=PEagleArguments(**{"output_dir": tempfile.mkdtemp(), "eval_strategy": "no"} | options),
        data_collator=PackingCollator(depths, 0.7, 0.2),
        signals=TargetSignals(target, config, drafter.draft_ids(), keep=keep),
        train_dataset=blocks,
    )


def build(lengths, *, target_online=False, segment_length=256, **shape):
    """A trainer, and a batch of one block of conversations of these lengths."""
    trainer = build_trainer(*load_target(), keep=not target_online, segment_length=segment_length, **shape)
    config = trainer.model.config
    ids = torch.randint(100, DRAFT_VOCABULARY, (sum(lengths),))
    mask = [int(at >= 0.3 * length) for length in lengths for at in range(length)]
    batch = trainer.data_collator([{"input_ids": ids, "loss_mask": mask, "seq_lengths": lengths}])
    if not target_online:  # in place of what the target would give
        for length, document in zip(lengths, ids.split(lengths)):
            signals = [torch.randn(1, length, width) for width in (config.num_features, config.target_hidden_size)]
            trainer.signals.kept[document.numpy().tobytes()] = tuple(signals)
    return trainer, batch


def timed(call, repeats=3):
    """Seconds of the fastest call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GiB


def step_of(trainer, batch):
    def step():
        trainer.training_step(trainer.model, batch, torch.tensor(1000))
        trainer.model.zero_grad(set_to_none=True)

    return step


def products_of(trainer, batch):
    """The bare products as a function: tokens with the fusion, slots with the layers' weights (with those of the last layer
    behind keys and values only the rows that are scored), rows with the heads."""
    drafter, slots = trainer.model, batch["anchor"].numel()
    tokens, rows = batch["input_ids"].numel(), int((batch["labels"] != -100).sum())
    places = len(torch.unique((batch["anchor"] + batch["depth"])[batch["labels"][0] != -100]))
    last = drafter.layers[-1]
    all_slots = {*drafter.layers[:-1].modules(), last.self_attn.k_proj, last.self_attn.v_proj}
    linears = [module for module in drafter.layers.modules() if isinstance(module, nn.Linear)]
    shapes = [(slots if linear in all_slots else rows, linear) for linear in linears]
    shapes += [(tokens, drafter.fc), (rows, drafter.lm_head)]
    inputs = [torch.randn(count, linear.in_features, requires_grad=True) for count, linear in shapes]
    inputs[-2].requires_grad_(False)  # the features
    gradients = [torch.randn(count, linear.out_features) for count, linear in shapes]
    hidden = torch.randn(places, trainer.signals.head.shape[1])

    def products():
        for x, (_, linear), gradient in zip(inputs, shapes, gradients):
            linear(x).backward(gradient)
        trainer.signals.head @ hidden.T

    return products


def measure(kind, **options) -> dict:
    """One line of a table, in this process."""
    trainer, batch = build(**options)
    step = step_of(trainer, batch)
    numbers = {"slots": batch["anchor"].numel(), "seconds": timed(step, 1), "GiB": peak()}
    if kind == "step":  # in turns, as the pace of a machine changes
        products = products_of(trainer, batch)
        rounds = [(timed(step, 1), timed(products, 1)) for _ in range(8)]
        numbers["seconds"], numbers["floor"] = map(min, zip(*rounds))
    return numbers


def apart(kind, **options) -> dict:
    """[`measure`] in a process of its own."""
    line = [sys.executable, __file__, "--line", json.dumps({"kind": kind} | options)]
    run = subprocess.run(line, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr[-3000:])
    return json.loads(run.stdout.splitlines()[-1])


def step_table():
    for lengths in ([220, 240], [230] * 8, [1024], [1024] * 4):
        n = apart("step", lengths=lengths)
        row = {"conversations": len(lengths), "tokens": sum(lengths), "slots": n["slots"], "step, s": n["seconds"]}
        yield row | {"bare products, s": n["floor"], "ratio": n["seconds"] / n["floor"]}


def length_table():
    def row(length, outputs, **options):
        n = apart("length", lengths=[length], depths=8, **options)
        numbers = {"slots, K_train 8": n["slots"], "step, s": n["seconds"], "peak memory, GiB": n["GiB"]}
        return {"tokens": length, "the target's outputs": outputs} | numbers

    for length in (2048, 4096, 8192, 16384, 32768):
        yield row(length, "kept in memory")
    yield row(32768, "online", target_online=True)


def shape_table():
    usual = {"depths": 5, "layers": 1, "segment_length": 256}
    changes = ({}, {"depths": 1}, {"depths": 8}, {"layers": 2}, {"layers": 4})
    for change in (*changes, {"segment_length": 512}, {"segment_length": 4096}):
        shape = usual | change
        n = apart("shape", lengths=[4096], **shape)
        row = dict(zip(("K_train", "layers", "segment"), shape.values()))
        yield row | {"slots": n["slots"], "step, s": n["seconds"], "peak memory, GiB": n["GiB"]}


class Clock(TrainerCallback):
    """Seconds of every epoch, and of the steps in it."""

    def __init__(self, trainer):
        self.epochs, self.steps, step = [], [], trainer.training_step

        def timed_step(*args, **kwargs):
            start = time.perf_counter()
            loss = step(*args, **kwargs)
            self.steps[-1] += time.perf_counter() - start
            return loss

        trainer.training_step = timed_step

    def on_epoch_begin(self, *args, **kwargs):
        self.epochs.append(-time.perf_counter())
        self.steps.append(0.0)

    def on_epoch_end(self, *args, **kwargs):
        self.epochs[-1] += time.perf_counter()


def ways_table():
    target, tokenizer = load_target()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        texts = [" ".join(f"{word * number % 997}" for word in range(90)) for number in range(16)]
        turns = [[{"role": "user", "content": text[:90]}, {"role": "assistant", "content": text}] for text in texts]
        chats = folder / "chats.jsonl"
        chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
        pack_conversations(chats, folder / "blocks", tokenizer, max_seq_len=512, eval_fraction=0, progress=False)
        blocks = load_blocks(folder / "blocks", cache_dir=str(folder / "cache"))["train"]
        tokens, start = sum(map(len, blocks["input_ids"])), time.perf_counter()
        layers = default_layer_ids(target.config.num_hidden_layers)
        extract_features(target, tokenizer, folder / "blocks", folder / "features", layer_ids=layers, progress=False)
        heads = ("the target's outputs", "ms a token, epoch 1", "epoch 2", "of it outside of steps")
        extraction = 1000 * (time.perf_counter() - start) / tokens
        yield dict(zip(heads, (f"extraction of {tokens:,} tokens", extraction, None, None)))
        for way in ("online", "kept in memory", "read from shards"):
            dataset = FeatureShards(folder / "features") if way == "read from shards" else blocks
            options = {"num_train_epochs": 2, "save_strategy": "no"}
            trainer = build_trainer(target, tokenizer, blocks=dataset, keep=way == "kept in memory", **options)
            clock = Clock(trainer)
            trainer.add_callback(clock)
            trainer.train()
            first, second = (1000 * seconds / tokens for seconds in clock.epochs)
            yield dict(zip(heads, (way, first, second, f"{1 - clock.steps[1] / clock.epochs[1]:.1%}")))


TABLES = {"step": step_table, "length": length_table, "shape": shape_table, "ways": ways_table}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--line"]:
        print(json.dumps(measure(**json.loads(sys.argv[2]))))
    else:
        arguments = parser(__doc__)
        arguments.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}")
        args = arguments.parse_args()
        if unknown := {*args.tables} - {*TABLES}:
            arguments.error(f"there is no table {', '.join(unknown)}")
        tables = {name: TABLES[name] for name in args.tables or TABLES}
        measure_tables(tables, environment(load_target()[0]), args.output)
