"""The flags of `train_peagle.py`, and what of them cannot be; from the command line or a YAML file (`--config`)."""

from dataclasses import dataclass, field

from transformers import TrainingArguments
from transformers.hf_argparser import HfArg
from trl import TrlParser

from data.prompts import EVAL_FRACTION, MAX_SEQ_LEN
from losses_peagle import LOSSES, WEIGHTS


@dataclass
class PEagleArguments(TrainingArguments):
    """[`TrainingArguments`] with the drafter's; the defaults suit the default target on a laptop CPU."""

    target_hidden_dim: int | None = HfArg(default=None, help="Width of the target, if it is to be checked.")
    use_flash_attention: bool = HfArg(
        default=False, help="Varlen flash attention for the target; needs CUDA and flash-attn."
    )
    yes: bool = HfArg(default=False, help="Start without asking, on a terminal too.")
    train_file: str | None = HfArg(default=None, help="Conversations to pack in memory: JSON Lines or a data set.")
    train_dir: str | None = HfArg(default=None, help="In place of --train_file: blocks of data.sequence_packing.")
    feature_dir: list[str] | None = HfArg(
        default=None, help="In place of both: one folder of data.extract_features, or several to train on together."
    )
    shard_cache_size: int = HfArg(default=4, help="Shards of --feature_dir held open at a time.")
    target_model: str | None = HfArg(
        default=None, help="Hub id or folder of the target; SmolLM2-135M-Instruct if unset."
    )
    eval_fraction: float = HfArg(default=EVAL_FRACTION, help="Share of the conversations that is held out.")
    max_seq_len: int = HfArg(default=MAX_SEQ_LEN, help="Tokens per packed block; longer conversations become windows.")
    drafter_model: str | None = HfArg(
        default=None,
        help="Hub id or folder of a small language model of the target's family to make the drafter of; a drafter with layers "
        "of its own if unset.",
    )
    use_lora: bool = HfArg(default=False, help="Train the model of --drafter_model by LoRA; else all of it.")
    lora_rank: int = HfArg(default=64, help="Rank of the updates.")
    lora_alpha: int = HfArg(default=256, help="The updates count lora_alpha / lora_rank.")
    lora_target_modules: str = HfArg(
        default="all-linear", help="Layers to update: `all-linear`, or names separated by commas."
    )
    parallel_drafting: bool = HfArg(
        default=True,
        help="Whether to draft all depths in one forward; else one token after the other (EAGLE-3), to compare with.",
    )
    num_layers: int = HfArg(default=1, help="Layers of a drafter without --drafter_model.")
    init_from_target: bool = HfArg(default=False, help="Start from the target's last layers and final norm.")
    init_from_drafter: str | None = HfArg(
        default=None,
        help="Folder or Hub id of a drafter of the same shape to start from; its draft vocabulary may be another one.",
    )
    draft_vocab_size: int = HfArg(
        default=6144, help="Tokens that the drafter can propose; 0 for the whole vocabulary."
    )
    fc_norm: bool = HfArg(
        default=True, help="Whether to normalise the target's features layer by layer before the fusion."
    )
    markov_rank: int = HfArg(default=0, help="Rank of a head that tells every depth of the token before; 0 for none.")
    speculation_depth: int = HfArg(default=4, help="Draft tokens per round when decoding (K).")
    num_depths: int = HfArg(default=5, help="Depths to train (K_train), at least speculation_depth.")
    cod_ratio: float = HfArg(default=0.7, help="Share of the slots kept from one depth to the next (COD sampling).")
    cod_floor: float = HfArg(default=0.2, help="Smallest share of the slots kept at any depth.")
    max_anchors: int | None = HfArg(
        default=None, help="Most slots of any depth beyond the first in a batch; no limit if unset."
    )
    segment_length: int | None = HfArg(
        default=None,
        help="Tokens to learn at a time; the gradient is that of the whole, the memory that of a segment. On a CPU 256, as "
        "no time goes into attention between documents then, else 4096, if unset.",
    )
    loss: str = HfArg(default="kl", help="Loss of a slot: " + ", ".join(f"`{name}`" for name in LOSSES) + ".")
    depth_weights: str = HfArg(
        default="uniform", help="What its depth counts: " + ", ".join(f"`{name}`" for name in WEIGHTS) + "."
    )
    feature_noise: float = HfArg(
        default=0.0, help="Uniform noise on the features, as a share of their root mean square."
    )
    mask_token_id: int | None = HfArg(default=None, help="Reserved token of the mask slots; found if unset.")
    embeddings: str | None = HfArg(
        default=None,
        help="Token half of the slots: `borrowed` (the target's table, frozen), `mask_row` (a copy, only the mask token's "
        "row is trained) or `trained` (a copy, all trained). The latter two save the table with the drafter. If unset, "
        "borrowed, and mask_row of the model's own table with --drafter_model.",
    )
    keep_features: bool = HfArg(
        default=False, help="Keep the target's outputs in memory, so that it runs in the first epoch only."
    )

    save_dtype: str = HfArg(
        default="float16",
        help="Precision of the finished drafter in output_dir; checkpoints keep float32 to resume from.",
    )

    num_train_epochs: float = HfArg(default=3.0, aliases=["--num_epochs"], help="Passes over the data.")
    max_minutes: float | None = HfArg(
        default=None,
        help="Take only as many steps as fit into so many minutes by a measured one, so that the schedule ends in time; what "
        "evaluations take comes on top. A resumed run keeps the number that it began with.",
    )
    per_device_train_batch_size: int = HfArg(
        default=1, aliases=["--batch_size"], help="Packed blocks per device and step."
    )
    per_device_eval_batch_size: int = HfArg(default=1, help="Packed blocks per device when evaluating.")
    resume_from_checkpoint: str | None = HfArg(
        default=None,
        aliases=["--resume"],
        help="Go on with the last checkpoint of --output_dir (`true`), or with this one.",
        metadata={"nargs": "?", "const": "true"},
    )
    save_steps: float = HfArg(default=500, aliases=["--save_every"], help="Optimizer steps between checkpoints.")
    eval_strategy: str = HfArg(default="steps", help="When to decode the held-out prompts: `steps`, `epoch` or `no`.")
    eval_steps: float | None = HfArg(
        default=None, help="Optimizer steps between evaluations; those of --save_every if unset."
    )
    eval_prompts: int = HfArg(default=8, help="Held-out prompts that each evaluation decodes, for the true tau.")
    eval_new_tokens: int = HfArg(default=64, help="Longest answer to them, in tokens.")
    load_best_model_at_end: bool = HfArg(default=True, help="Keep the checkpoint of the best tau.")
    metric_for_best_model: str = HfArg(default="eval_tau", help="What the best checkpoint is chosen by.")
    include_num_input_tokens_seen: str = field(default="all", repr=False)  # for the learning curve
    learning_rate: float = HfArg(default=1e-3, help="Peak learning rate.")
    muon: bool = HfArg(
        default=False,
        help="Learn the matrices of the layers by Muon, and only the rest by AdamW: the drafter learns more of each token. Takes "
        "learning rates about twice as high.",
    )
    lr_scheduler_type: str = HfArg(default="cosine", help="Learning-rate schedule.")
    warmup_steps: float = HfArg(default=0.05, help="Warm-up steps, or their share if below 1.")
    adam_beta2: float = HfArg(default=0.95, help="Beta2 of AdamW.")
    max_grad_norm: float = HfArg(default=0.5, help="Gradient clipping.")
    logging_steps: float = HfArg(default=20, help="Optimizer steps between log lines.")
    data_digest: str | None = field(default=None, init=False, repr=False)  # no flag: what there is to learn
    # The collator reads columns that the model's forward does not name.
    remove_unused_columns: bool = field(default=False, repr=False)

    def __post_init__(self):
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.save_steps
        self.load_best_model_at_end &= (
            self.eval_strategy != "no" and self.save_strategy != "no" and self.eval_prompts > 0
        )
        super().__post_init__()
        if self.segment_length is None:
            self.segment_length = 256 if self.device.type == "cpu" else 4096
        self.dataloader_pin_memory &= self.device.type != "cpu"  # torch warns otherwise
        if isinstance(self.feature_dir, str):  # as a YAML file gives it
            self.feature_dir = [self.feature_dir]
        if [self.train_file, self.train_dir, self.feature_dir].count(None) != 2:
            raise ValueError(
                "Name what to train on, and only one of them: --train_file chats.jsonl, --train_dir blocks or --feature_dir "
                "features."
            )
        if not 1 <= self.speculation_depth <= self.num_depths:
            raise ValueError(
                f"--speculation_depth is {self.speculation_depth}, but --num_depths trains {self.num_depths}: draft no deeper "
                "than is trained."
            )
        if self.save_dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"--save_dtype is {self.save_dtype!r}; choose float32, bfloat16 or float16.")
        if self.embeddings is None:
            self.embeddings = "borrowed" if self.drafter_model is None else "mask_row"
        choices = {"embeddings": ("borrowed", "mask_row", "trained"), "loss": LOSSES, "depth_weights": WEIGHTS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} is {getattr(self, name)!r}; choose one of {', '.join(known)}.")
        if self.init_from_drafter is not None and self.init_from_target:
            raise ValueError("--init_from_drafter and --init_from_target are two starts: choose one.")
        masked = {"drafter_model": None, "markov_rank": 0, "mask_token_id": None}
        parallel = [name for name, unset in masked.items() if getattr(self, name) != unset]
        parallel += ["embeddings mask_row"] * (self.embeddings == "mask_row" and not parallel)
        if parallel and not self.parallel_drafting:
            raise ValueError(
                f"--{parallel[0]} is for drafting in parallel: leave it unset, or --parallel_drafting true."
            )
        if self.use_lora and self.drafter_model is None:
            raise ValueError("--use_lora trains the model of --drafter_model: name one.")
        if self.muon and (self.use_lora or not self.optim.startswith("adamw_torch")):
            raise ValueError(
                "--muon moves whole matrices, which --use_lora does not train, and leaves the rest to AdamW, which another --optim "
                "replaces: drop one of them."
            )
        possible = ("mask_row",) if self.use_lora else ("mask_row", "trained")
        if self.drafter_model is not None and self.embeddings not in possible:
            raise ValueError(
                f"--embeddings {self.embeddings}: with --drafter_model{' and --use_lora' if self.use_lora else ''} choose "
                f"{' or '.join(possible)}."
            )
        least = {
            "markov_rank": 0,
            "num_depths": 1,
            "num_layers": 1,
            "lora_rank": 1,
            "lora_alpha": 1,
            "eval_prompts": 0,
        }
        least |= {"shard_cache_size": 1, "draft_vocab_size": 0, "feature_noise": 0.0, "max_anchors": 1}
        for name, value in least.items():
            if getattr(self, name) is not None and not value <= getattr(self, name) < float("inf"):  # NaN as well
                raise ValueError(f"--{name} is {getattr(self, name)}; it has to be at least {value}.")
        if self.dataloader_persistent_workers:
            raise ValueError(
                "--dataloader_persistent_workers must stay false: kept workers would not learn of a new epoch."
            )
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError(f"--max_minutes is {self.max_minutes}; it has to be above 0.")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"--eval_fraction is {self.eval_fraction}; choose from 0 (hold nothing out) to below 1.")
        if self.segment_length < 2:  # the first token of a text may have no slot
            raise ValueError(f"--segment_length is {self.segment_length}; a segment has at least two tokens.")
        if self.gradient_checkpointing:
            raise ValueError("--gradient_checkpointing is not supported: lower --segment_length to save memory.")
        if not (0 < self.cod_ratio <= 1 and 0 <= self.cod_floor <= 1):
            raise ValueError(
                f"--cod_ratio is {self.cod_ratio} and --cod_floor {self.cod_floor}; they are shares, the ratio above 0."
            )
        if self.remove_unused_columns:
            raise ValueError(
                "--remove_unused_columns must stay false: the collator reads columns that it would remove."
            )
        if self.push_to_hub:
            raise ValueError(
                "--push_to_hub would publish the training folder as it is, without card and code: train first, then "
                f"python publish_peagle.py drafter --drafter {self.output_dir} --push_to_hub org/name"
            )
        if self.neftune_noise_alpha is not None:
            raise ValueError(
                "--neftune_noise_alpha is not supported: the embeddings that it disturbs are the target's."
            )


class ArgumentParser(TrlParser):
    """A [`TrlParser`] whose YAML files take every name that the command line takes, `batch_size` as well as
    `per_device_train_batch_size`, and no others."""

    def set_defaults_with_config(self, **config):
        names = {option.lstrip("-"): action.dest for action in self._actions for option in action.option_strings}
        if unknown := sorted(set(config) - set(names)):
            raise ValueError(f"The --config file sets {', '.join(unknown)}, which no option is called; see --help.")
        return super().set_defaults_with_config(**{names[name]: value for name, value in config.items()})


def parse_arguments() -> PEagleArguments:
    """Those of the command line. Raises ValueError or FileNotFoundError where they, or a file of theirs, cannot be."""
    parser = ArgumentParser(PEagleArguments)
    parser.epilog = "--config recipe.yaml reads any of these from a file; what the command line says comes first."
    (arguments,) = parser.parse_args_and_config()
    return arguments
