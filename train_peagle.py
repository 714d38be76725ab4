"""Train a P-EAGLE drafter on conversations: `accelerate launch train_peagle.py --train_file chats.jsonl --output_dir out`.

The frozen target reads each packed block once and supplies both the features that the drafter sees and the distribution
that it learns; the drafter learns all depths of all sampled slots in one forward. Every checkpoint is a complete drafter
(with --use_lora only the finished one, the others to resume from).
"""

import math
import os
import shutil
import sys
import time
from datetime import timedelta
from hashlib import sha256
from itertools import islice

import psutil
import torch
import yaml
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig
from transformers.trainer_utils import set_seed

from acceptance_peagle import Calibration, decode, prompts_of
from arguments_peagle import PEagleArguments, parse_arguments
from configuration_peagle import PEagleBackboneConfig, PEagleConfig
from data.collator import PackingCollator
from data.feature_shards import FeatureShards
from data.sequence_packing import first_sample, load_blocks, pack_file
from data.vocabulary import choose_draft_vocabulary, choose_mask_token, count_tokens
from lora_peagle import add_lora, merge_lora
from modeling_peagle import Drafter, PEagleModel
from modeling_peagle_backbone import PEagleBackboneModel
from published_peagle import MASK_TOKENS
from resume_peagle import check_draft_vocabulary, check_flags, checkpoint_to_resume, held, state_of
from target_peagle import DEFAULT_TARGET, load_target, stop_token_ids
from trainer_peagle import PEagleTrainer, TargetSignals


MEASURED_BATCHES = 4  # whose mean is the estimate; blocks differ in how many slots they have


def build_drafter(args: PEagleArguments, target, tokenizer, draft_ids: torch.LongTensor | None) -> Drafter:
    """A fresh drafter of the kind that the flags name, with what is not trained frozen."""
    fields = {
        "mask_token_id": args.mask_token_id,
        "parallel_drafting": args.parallel_drafting,
        "draft_vocab_size": args.draft_vocab_size or None,
        "num_depths": args.num_depths,
        "fc_norm": args.fc_norm,
        "markov_rank": args.markov_rank,
        "speculation_depth": args.speculation_depth,
        "target_name_or_path": args.target_model or DEFAULT_TARGET,
    }
    if args.drafter_model is None:
        shape = {"num_hidden_layers": args.num_layers, "own_embeddings": args.embeddings != "borrowed"}
        config = PEagleConfig.for_target(target, tokenizer, **shape, **fields)
        drafter = PEagleModel.from_target(target, config, draft_ids)
        if args.init_from_target:
            drafter.take_layers(target)
    else:
        backbone, backbone_tokenizer = load_target(args.drafter_model, dtype=torch.float32, device="cpu")
        config = PEagleBackboneConfig.for_backbone(target, tokenizer, backbone, backbone_tokenizer, **fields)
        drafter = PEagleBackboneModel.from_backbone(backbone, config, draft_ids)
    if args.init_from_drafter is not None:
        take_drafter(drafter, args.init_from_drafter)
    if args.use_lora:
        add_lora(drafter, args.lora_rank, args.lora_alpha, args.lora_target_modules)
    else:
        freeze(drafter, args.embeddings)
    return drafter


@torch.no_grad()
def take_drafter(drafter: Drafter, folder: str):
    """Start from what the drafter in `folder` has learned. Rows of draft tokens that it does not have stay fresh; its Markov
    head says nothing after those, as what it has learned would make a bias of their random rows.

    Raises:
        ValueError: It is of another shape, or was trained for another target.
    """
    other = type(drafter).from_pretrained(folder, dtype=torch.float32)
    ours, theirs = drafter.draft_ids(), other.draft_ids()
    shared = torch.isin(ours, theirs)
    rows = torch.searchsorted(theirs, ours[shared])
    state, learned = drafter.state_dict(), other.state_dict()
    differ = {name.split(".")[0] for name in state.keys() ^ learned.keys()} - {"d2t"}
    # What changes no shape, but what the weights mean. A published drafter does not know its target's tokenizer.
    for name in ("target_tokenizer_hash", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_output"):
        if getattr(other.config, name, None) not in (None, getattr(drafter.config, name, None)):
            differ.add(name)
    for name in state.keys() & learned.keys() - {"d2t"}:
        mine, given = state[name], learned[name]
        by_token = name.startswith(("lm_head.", "markov_head."))  # a row for each draft token
        if (mine.shape[1:] if by_token else mine.shape) != (given.shape[1:] if by_token else given.shape):
            differ.add(name)
        elif by_token:
            mine[shared] = given[rows]
            if name == "markov_head.given.weight":
                mine[~shared] = 0
        else:
            mine.copy_(given)
    if differ:
        raise ValueError(
            f"--init_from_drafter: the drafter in {folder} is another one than the flags and the target make, they differ in "
            f"{', '.join(sorted(differ)[:6])}: use the flags that it was trained with."
        )


def freeze(drafter: Drafter, embeddings: str):
    """A drafter's head stays the target's if it is one, of its width; `embeddings` is the option of that name."""
    if isinstance(drafter, PEagleModel):
        same_width = drafter.config.hidden_size == drafter.config.target_hidden_size
        drafter.lm_head.weight.requires_grad_(not same_width)
    if embeddings == "mask_row":
        table = drafter.get_input_embeddings().weight
        row = torch.zeros(len(table), 1)
        row[drafter.config.mask_token_id] = 1
        table.register_hook(lambda grad: grad * row.to(grad))


def read_blocks(args: PEagleArguments, tokenizer, stop_ids: set[int]) -> dict:
    """The packed blocks, with the target's signals or without: "train" and "eval", each a map-style dataset."""
    if args.feature_dir is not None:
        options = {"cache_size": args.shard_cache_size}
        return {side: FeatureShards(*args.feature_dir, split=side, **options) for side in ("train", "eval")}
    if args.train_dir is not None:
        return load_blocks(args.train_dir, tokenizer)
    options = {"max_seq_len": args.max_seq_len, "eval_fraction": args.eval_fraction, "stop_token_ids": stop_ids}
    return pack_file(args.train_file, tokenizer, progress=args.process_index == 0, **options)[0]


def texts_of(blocks):
    return blocks.texts() if isinstance(blocks, FeatureShards) else blocks


def updates_per_epoch(trainer: PEagleTrainer) -> int:
    return math.ceil(len(trainer.get_train_dataloader()) / trainer.args.gradient_accumulation_steps)


def planned_updates(trainer: PEagleTrainer) -> int:
    args = trainer.args
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * updates_per_epoch(trainer))


def planned_evaluations(trainer: PEagleTrainer, updates: int) -> int:
    """Those during so many updates, at the last one too, and the one that the finished drafter gets."""
    args = trainer.args
    if trainer.eval_dataset is None or args.eval_strategy == "no":
        return int(trainer.eval_dataset is not None)
    every = updates_per_epoch(trainer)
    if args.eval_strategy == "steps":
        every = args.eval_steps if args.eval_steps >= 1 else math.ceil(planned_updates(trainer) * args.eval_steps)
    return math.ceil(updates / max(every, 1)) + 1


def measure_batch(trainer: PEagleTrainer) -> tuple[float, float, float]:
    """Tokens and slots of a batch, and the seconds that it takes (the optimizer apart) in the slowest process: the means of
    some batches of the training data.
    """

    def step(batch):
        if trainer.signals.kept is not None:
            trainer.signals.kept.clear()  # as in the first epoch, whose batches the target has not read yet
        with trainer.accelerator.autocast():  # the model has it only once training has begun
            trainer.training_step(trainer.model, batch, torch.ones((), device=trainer.args.device))

    with torch.random.fork_rng():
        batches = [*islice(trainer.get_train_dataloader(), MEASURED_BATCHES)]
        step(batches[0])  # warms up
        start = time.perf_counter()
        for batch in batches:
            step(batch)
        seconds = (time.perf_counter() - start) / len(batches)
        trainer.model.zero_grad(set_to_none=True)
        trainer.forget_metrics()
    tokens, slots = (sum(batch[name].numel() for batch in batches) / len(batches) for name in ("input_ids", "anchor"))
    return tokens, slots, slowest(trainer, seconds)


def measure_evaluation(trainer: PEagleTrainer) -> float:
    """Seconds that an evaluation takes, in the slowest process: by one batch, and one answer.

    That is a whole one to the longest prompt, and of a drafter that has learned nothing yet: later ones take fewer forwards.
    """
    loader, prompts, tokens = trainer.get_eval_dataloader(), trainer.prompts, trainer.args.eval_new_tokens
    trainer.model.eval()
    with torch.random.fork_rng(devices=[]):
        batch = next(iter(loader))
        start = time.perf_counter()
        trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)
        read = time.perf_counter()
        if prompts:
            decode(trainer.signals.target, trainer.model, [max(prompts, key=len)], tokens, min_new_tokens=tokens)
        seconds = (read - start) * len(loader) + (time.perf_counter() - read) * len(prompts)
    trainer.forget_metrics()
    return slowest(trainer, seconds)


def slowest(trainer: PEagleTrainer, seconds: float) -> float:
    return trainer.accelerator.gather(torch.tensor([seconds], device=trainer.args.device)).max().item()


def cost(trainer: PEagleTrainer, tokens: int, batch: tuple[float, float, float], done: int) -> str:
    """What training will take, in words; `tokens` is what an epoch reads, `batch` from [`measure_batch`], `done` the updates of
    a run that goes on.
    """
    read, slots, seconds = batch
    args, updates = trainer.args, max(planned_updates(trainer) - done, 0)
    forwards, evaluations = updates * args.gradient_accumulation_steps, planned_evaluations(trainer, updates)
    judged = ""
    if evaluations:
        longest = timedelta(seconds=round(measure_evaluation(trainer) * evaluations))
        judged = f", and about {longest} for {evaluations} evaluation{'s' * (evaluations > 1)}"
    parameters = list(trainer.model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    checkpoints = (
        min(math.ceil(updates / args.save_steps), args.save_total_limit or updates) if args.save_steps >= 1 else 1
    )
    memory = torch.cuda.max_memory_allocated() if args.device.type == "cuda" else psutil.Process().memory_info().rss
    signals = "computed anew in every epoch"
    if "features" in batch:
        signals = "read from the disk"
    elif trainer.signals.kept is not None:
        signals = "kept in memory"
    whole = sum(parameter.numel() for parameter in parameters)
    disk = checkpoints * (4 * whole + 8 * trained)  # float32, and AdamW's two moments
    folder = os.path.abspath(args.output_dir)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    if disk > free:
        raise ValueError(
            f"The checkpoints need {disk / 1e9:.2f} GB, but on the disk of {args.output_dir} only {free / 1e9:.2f} GB are free: "
            "make room, or lower --save_total_limit."
        )
    flops = 6 * whole * slots * forwards
    return (
        f"{tokens:,} tokens an epoch, the target's outputs {signals}; {trained:,} trained parameters\n"
        f"{f'{done:,} updates done, ' * bool(done)}{updates:,} updates of {args.gradient_accumulation_steps} x {args.world_size} batches of about {read:,.0f} tokens and "
        f"{slots:,.0f} slots: {flops * args.world_size:.1e} FLOPs of the drafter, {timedelta(seconds=round(seconds * forwards))} "
        f"at {seconds:.2f} s a batch{judged}\n"
        f"{(memory + 8 * trained) / 1e9:.1f} GB of memory, {disk / 1e9:.2f} GB on the disk for {checkpoints} checkpoint{'s' * (checkpoints > 1)}"
    )


def train_on(trainer: PEagleTrainer, checkpoint: str | None):
    """Trains, from a checkpoint if there is one. Of a run that has all its steps the Trainer would take one more."""
    if checkpoint is not None:
        state = state_of(checkpoint)
        if 0 < trainer.args.max_steps <= state.global_step:
            print(f"{checkpoint} has all of its {state.global_step} steps; it is only evaluated and saved")
            trainer.state = state
            trainer._load_from_checkpoint(checkpoint)
            if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
                trainer._load_best_model()
            return
    trainer.train(resume_from_checkpoint=checkpoint)


def main(args: PEagleArguments):
    with held(args):
        run(args)


def run(args: PEagleArguments):
    set_seed(args.seed)
    if args.device.type == "cpu":
        # accelerate starts every process with one thread, whatever the machine has.
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        torch.set_num_threads(max(1, cores // args.world_size))
    attention = "flash_attention_2" if args.use_flash_attention else "sdpa"
    target, tokenizer = load_target(args.target_model, device=args.device, attn_implementation=attention)
    width = target.config.get_text_config().hidden_size
    if args.target_hidden_dim not in (None, width):
        raise ValueError(f"--target_hidden_dim is {args.target_hidden_dim}, but the target's hidden size is {width}.")
    stop_ids = stop_token_ids(target.generation_config)
    blocks = read_blocks(args, tokenizer, stop_ids)
    train, held_out = blocks["train"], blocks["eval"]
    print("a sample, supervised tokens in brackets:", first_sample(texts_of(train), tokenizer), sep="\n")
    seen, supervised = count_tokens(texts_of(train), target.get_input_embeddings().weight.shape[0])
    if not supervised.any():
        raise ValueError(
            "Nothing is supervised: no conversation has an answer of the assistant in its loss mask, so there is nothing to learn."
        )
    args.data_digest = sha256(seen.tobytes() + supervised.tobytes()).hexdigest()
    draft_ids = None
    if args.draft_vocab_size >= len(seen):  # all of it
        args.draft_vocab_size = 0
    if args.draft_vocab_size:
        draft_ids, coverage = choose_draft_vocabulary(supervised, args.draft_vocab_size, stop_ids)
        print(f"the draft vocabulary of {args.draft_vocab_size} covers {coverage:.2%} of the supervised tokens")
    used = set(seen.nonzero()[0].tolist()) | stop_ids
    if args.mask_token_id is None and args.init_from_drafter is not None:
        start, _ = PreTrainedConfig.get_config_dict(args.init_from_drafter)
        args.mask_token_id = next((start[name] for name in MASK_TOKENS if start.get(name) is not None), None)
    if args.mask_token_id is None and args.parallel_drafting:
        args.mask_token_id = choose_mask_token(tokenizer, used)
    elif args.mask_token_id in used:
        raise ValueError(f"--mask_token_id {args.mask_token_id} occurs in the chats: name a token that never does.")
    drafter = build_drafter(args, target, tokenizer, draft_ids)
    config = drafter.config
    prompts = [*islice(prompts_of(texts_of(held_out), args.max_seq_len), args.eval_prompts)]
    if not prompts:  # nothing to be judged by
        args.eval_strategy, args.load_best_model_at_end = "no", False
    if args.feature_dir is not None:
        train.check(target, tokenizer, config.eagle_aux_hidden_state_layer_ids)

    trainer = PEagleTrainer(
        model=drafter,
        args=args,
        train_dataset=train,
        eval_dataset=held_out if len(held_out) else None,
        data_collator=PackingCollator(
            args.num_depths, args.cod_ratio, args.cod_floor, args.max_anchors, config.first_slot
        ),
        signals=TargetSignals(target, config, drafter.draft_ids(), args.keep_features),
        prompts=prompts,
    )
    if len(trainer.get_train_dataloader()) == 0:
        raise ValueError(
            f"{len(train)} blocks do not fill one batch of {args.per_device_train_batch_size} on each of {args.world_size} "
            "devices, and --dataloader_drop_last drops what does not: lower --batch_size or leave it false."
        )
    checkpoint = checkpoint_to_resume(args, config)
    if checkpoint is not None:
        check_draft_vocabulary(checkpoint, drafter)
        if args.max_minutes is not None:
            args.max_steps = state_of(checkpoint).max_steps
        check_flags(checkpoint, args)
    batch = measure_batch(trainer)
    if args.max_minutes is not None and checkpoint is None:
        fitting = int(60 * args.max_minutes / (batch[-1] * args.gradient_accumulation_steps))
        args.max_steps = max(1, min(fitting, planned_updates(trainer)))
    done = state_of(checkpoint).global_step if checkpoint is not None else 0
    expected = cost(trainer, int(seen.sum()), batch, done)
    if args.process_index == 0:
        print(expected)
        if sys.stdin.isatty() and not args.yes and input("start? [Y/n] ").strip().lower() not in ("", "y", "yes"):
            raise KeyboardInterrupt
    train_on(trainer, checkpoint)
    if len(held_out):
        trainer.calibration = Calibration(config)
        metrics = trainer.evaluate()
        config.draft_temperatures = trainer.calibration.temperatures()
    if trainer.is_fsdp_enabled:  # the drafter is spread over the processes; one of them gets the whole
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        if trainer.is_fsdp_enabled:
            drafter = build_drafter(args, target, tokenizer, draft_ids)
            drafter.load_state_dict(state)
            drafter.config.draft_temperatures = config.draft_temperatures
        if args.use_lora:
            merge_lora(drafter)
        drafter.to(getattr(torch, args.save_dtype)).save_pretrained(args.output_dir)
        if len(held_out):
            words = ", ".join(f"{temperature:.2f}" for temperature in config.draft_temperatures)
            print(f"held-out conversations: {metrics}")
            print(f"temperatures that make the drafter as sure as it is right, by depth: {words}")
        best = trainer.state.best_model_checkpoint
        if best is not None:
            print(
                f"kept is {os.path.basename(best)}, with {args.metric_for_best_model} {trainer.state.best_metric:.3f}"
            )
        command = ["python evaluate_peagle.py --drafter", args.output_dir]
        command += ["--target", args.target_model] if args.target_model else []
        if args.train_file and len(held_out):
            command += ["--held_out_file", args.train_file, "--eval_fraction", str(args.eval_fraction)]
        print(f"the drafter is in {args.output_dir}; see what it gains: {' '.join(command)}")


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except (OSError, ValueError, ImportError, StrictDataclassError, SafetensorError, yaml.YAMLError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: go on with --resume")
