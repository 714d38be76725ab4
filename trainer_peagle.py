"""The P-EAGLE trainer: what the frozen target teaches, and a loss with exact gradients over segments of long texts.

A drafter learns all sampled slots of a text in one forward, which is a multiple of the text's length, and its attention
grows with the square of that. So a text is learned segment by segment: what a segment's slots see of earlier ones is
only the keys and values of the real slots. Those are computed first, without a graph; then the segments are
differentiated from the last to the first, and each one's gradient at the keys and values that it was given is passed on
to the segment that made them. The sum is the gradient of the whole; nothing but keys and values grows with the length.
"""

from collections import defaultdict
from contextlib import nullcontext
from itertools import pairwise

import torch
import torch.nn.functional as F
from transformers import DynamicCache, Trainer, TrainerCallback

from acceptance_peagle import LearningCurve, decode
from configuration_peagle import PEagleConfig
from data.feature_shards import FeatureShards, ShardShuffle
from data.target_signals import target_signals
from losses_peagle import LOSSES, WEIGHTS, Teacher, acceptance
from modeling_peagle import slot_layout, slot_visibility
from optimizer_peagle import MuonWithAdamW, matrices_of
from resume_peagle import save_flags


class TargetSignals:
    """What the frozen target contributes to a packed row: features for the drafter, and its distribution as the teacher.

    Args:
        target (`PreTrainedModel`): The target.
        config (`PEagleConfig`): The drafter's configuration.
        draft_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`): Target ids of the draft vocabulary.
        keep (`bool`): Keep the outputs of every block in memory: `4 * (features + hidden_size)` bytes per token in float32.
    """

    def __init__(self, target, config: PEagleConfig, draft_ids: torch.LongTensor, keep: bool):
        self.target, self.layer_ids = target, config.eagle_aux_hidden_state_layer_ids
        text = target.config.get_text_config()
        self.head = target.get_output_embeddings().weight[draft_ids.to(target.device)].detach()
        self.softcap = getattr(text, "final_logit_softcapping", None)
        self.kept = {} if keep else None

    @torch.no_grad()
    def __call__(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Features `(1, tokens, layers * target_hidden_size)` and post-norm last hidden states `(1, tokens, width)`."""
        if "features" in inputs:  # from the disk
            return inputs["features"], inputs["last_hidden"]
        lengths = inputs["cu_seq_lens_q"].diff().tolist()
        if self.kept is not None:
            # Documents do not see each other, so each is kept by itself, under its tokens, whatever block it is packed in.
            keys = [ids.cpu().numpy().tobytes() for ids in inputs["input_ids"][0].split(lengths)]
            if all(key in self.kept for key in keys):
                return tuple(torch.cat(parts, dim=1) for parts in zip(*(self.kept[key] for key in keys)))
        signals = target_signals(self.target, inputs, self.layer_ids)
        if self.kept is not None:
            parts = zip(*(signal.split(lengths, dim=1) for signal in signals))
            self.kept.update((key, tuple(part.clone() for part in pair)) for key, pair in zip(keys, parts))
        return signals

    @torch.no_grad()
    def distribution(self, hidden: torch.Tensor) -> Teacher:
        """The target's next-token distribution over the draft vocabulary, renormalised; scored in the target's dtype."""
        logits = F.linear(hidden.to(self.head.dtype), self.head).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return Teacher.of(logits)


def cut_segments(boundaries: list[int], segment_length: int) -> list[list[tuple[int, int]]]:
    """Where to cut a packed row into segments.

    Args:
        boundaries (`list[int]`): Where its documents start, and where the last one ends.
        segment_length (`int`): Most tokens per segment.

    Returns:
        `list[list[tuple[int, int]]]`: Ranges of tokens that cover the row in order. A list of one range is as many whole
        documents as fit into a segment; several ranges in one list are the pieces of one document that does not.
    """
    groups, start = [], 0
    for begin, end in pairwise(boundaries):
        if begin > start and end - start > segment_length:
            groups.append((start, begin))
            start = begin
    groups.append((start, boundaries[-1]))
    return [[(at, min(at + segment_length, end)) for at in range(begin, end, segment_length)] for begin, end in groups]


class EpochCallback(TrainerCallback):
    """Tells the collator the epoch, so that it samples other slots in each."""

    def __init__(self, collator):
        self.collator = collator

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.collator.epoch = int(state.epoch)


class PEagleTrainer(Trainer):
    """A [`Trainer`] whose loss is the drafter's over all sampled slots, averaged over every scored slot of a step.

    Args (beside those of [`Trainer`]):
        signals (`TargetSignals`): The frozen target.
        prompts (`list[list[int]]`): Held-out prompts, which every evaluation answers; its metrics have the true tau then.

    A [`Calibration`] that is set as `calibration` gets the scores of the evaluations after that.
    """

    _tag_names = ["peagle", "speculative-decoding"]

    def __init__(self, *args, signals: TargetSignals, prompts: list[list[int]] = (), **kwargs):
        super().__init__(*args, **kwargs)
        self.signals, self.prompts, self.calibration = signals, prompts, None
        self.add_callback(EpochCallback(self.data_collator))
        self.add_callback(LearningCurve())
        # The loss is divided by the scored slots of the whole step, over micro-batches and processes.
        self.model_accepts_loss_kwargs = True
        self.label_names = ["labels"]
        self.draft_ids, self.mask_token_id = self.model.draft_ids(), self.model.config.mask_token_id
        self.first_slot = self.model.config.first_slot
        self.embedding = None
        if not self.model.config.own_embeddings:
            self.embedding = signals.target.get_input_embeddings().weight
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

    def _save(self, output_dir=None, state_dict=None):
        # Named, the state is written in one file, a Markov head too: the Trainer reads no other when it goes on or takes the best.
        super()._save(output_dir, self.model.state_dict() if state_dict is None else state_dict)
        if self.args.should_save:
            save_flags(self.args, output_dir or self.args.output_dir)

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self._loss(model, inputs, num_items_in_batch, self.accelerator.backward)
        if not loss.isfinite():
            raise ValueError(
                f"The loss is no longer finite at step {self.state.global_step}: training has diverged. Begin anew with a lower "
                "--learning_rate, with --init_from_drafter from an earlier checkpoint if it was well there."
            )
        if num_items_in_batch is not None and num_items_in_batch == 0:
            # Without gradients the optimizer leaves the parameters alone; with zeros it would decay and drift on.
            model.zero_grad(set_to_none=True)
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The loss alone, without a graph. Training differentiates it in [`training_step`], segment by segment."""
        with torch.no_grad():
            loss = self._loss(model, inputs, num_items_in_batch)
        return (loss, {}) if return_outputs else loss

    def _loss(self, model, inputs, num_items_in_batch, backward=None) -> torch.Tensor:
        """The loss of a packed row; `backward`, if given, differentiates it."""
        features, hidden = self.signals(inputs)
        if not (features.isfinite().all() and hidden.isfinite().all()):
            raise ValueError(
                "the target's hidden states are not finite: float16 overflows in some targets (load it in bfloat16), or the "
                "features are damaged (extract them again)."
            )
        count = num_items_in_batch if num_items_in_batch is not None else (inputs["labels"] != -100).sum()
        scale = 1 / max(int(count), 1)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            scale *= self.accelerator.num_processes  # the gradient is averaged over processes afterwards
        if backward is not None and self.args.feature_noise:
            features = noisy(features, self.args.feature_noise)
        row = inputs | {"features": features, "hidden": hidden}
        segments = self._segments(inputs)
        loss = torch.zeros((), device=hidden.device)
        for number, pieces in enumerate(segments, start=1):
            # Processes exchange gradients once per step, at its last backward.
            last = backward is None or number == len(segments)
            loss += self._document(model, row, pieces, scale, last, backward)
        return loss

    def _segments(self, inputs) -> list[list[tuple[int, int]]]:
        """As [`cut_segments`], without what no loss depends on; at least one, as all processes have to go along."""
        segments = cut_segments(inputs["cu_seq_lens_q"].tolist(), self.args.segment_length)
        learned = inputs["anchor"][inputs["labels"][0] != -100] + 1
        needed = []
        for pieces in segments:
            ends = [
                number
                for number, (start, stop) in enumerate(pieces, 1)
                if ((learned >= start) & (learned < stop)).any()
            ]
            needed += [pieces[: ends[-1]]] if ends else []
        return needed or [segments[0][:1]]

    def _document(self, model, row, pieces, scale, last, backward) -> torch.Tensor:
        """The loss over the pieces of one document (or one piece of several), differentiated by `backward` if given."""
        first = pieces[0][0]
        past = self._read(model, row, pieces[:-1])
        gradients = [torch.zeros_like(tensor) for tensor in past]
        total = torch.zeros((), device=row["hidden"].device)
        for start, stop in reversed(pieces):
            begin, end = self._real_slots(first, start), self._real_slots(first, min(stop, pieces[-1][0]))
            given = [tensor[:, :, :begin].requires_grad_(backward is not None) for tensor in past]
            with nullcontext() if last and start == first else self.accelerator.no_sync(model):
                with self.compute_loss_context_manager():
                    loss, made = self._segment(model, row, start, stop, given, scale)
                total += loss.detach()
                if backward is None:
                    continue
                # What later segments make of this one's keys and values: an inner product with the gradient there.
                for tensor, gradient in zip(made, gradients):
                    loss = loss + (tensor[:, :, begin:end] * gradient[:, :, begin:end]).sum()
                backward(loss)
                for tensor, gradient in zip(given, gradients):
                    gradient[:, :, :begin] += tensor.grad
        return total

    @torch.no_grad()
    def _read(self, model, row, pieces) -> list[torch.Tensor]:
        """Keys and values of the real slots of `pieces`, each `(1, heads, slots, head_dim)`."""
        cache = DynamicCache()
        for start, stop in pieces:
            real = row["depth"] == 0
            cached = self._real_slots(pieces[0][0], start)
            slots, _ = self._slots(row, row["anchor"][real], row["depth"][real], start, stop, cached)
            with self.compute_loss_context_manager():
                model(**slots, cache=cache, rows=slice(0, 0))
        return keys_and_values(cache)

    def _real_slots(self, first, token) -> int:
        """How many real slots a document that starts at `first` has before a token."""
        return max(token - first - (not self.first_slot), 0)

    def _slots(self, row, anchor, depth, start, stop, cached) -> tuple[dict, torch.BoolTensor]:
        """The drafter's arguments for the slots of a range of tokens, behind `cached` real slots; and which these are.

        A slot belongs to the token after its anchor.
        """
        own = (anchor + 1 >= start) & (anchor + 1 < stop)
        anchor, depth = anchor[own], depth[own]
        begin = max(start - 1, 0)  # the first anchor with features
        slot_ids, feature_index, slot_positions = slot_layout(
            row["input_ids"][0, begin:],  # chains reach beyond the range
            row["position_ids"][0, begin:stop],
            anchor - begin,
            depth,
            self.mask_token_id,
            self.first_slot,
        )
        key_anchor = torch.cat([torch.arange(start - cached, start, device=anchor.device) - 1, anchor])
        visible = slot_visibility(anchor[:, None], depth[:, None], key_anchor, F.pad(depth, (cached, 0)))
        document = row["document_ids"][0]
        arguments = {
            "input_ids": slot_ids[None],
            "features": row["features"][:, begin : stop - 1],
            "feature_index": feature_index[None],
            "position_ids": slot_positions[None],
            "visible": (visible & (document[anchor + 1][:, None] == document[key_anchor + 1]))[None],
            "embedding": self.embedding,
        }
        return arguments, own

    def _segment(self, model, row, start, stop, given, scale) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss of one segment behind the keys and values `given`, and the keys and values of all that its slots see."""
        cached = given[0].shape[2] if given else 0
        arguments, own = self._slots(row, row["anchor"], row["depth"], start, stop, cached)
        anchor, depth, labels = row["anchor"][own], row["depth"][own], row["labels"][0, own]
        rows = (labels != -100).nonzero()[:, 0]
        # The token at a + 2 + d is what the target predicts at a + 1 + d; many slots share such a place.
        rows = rows[(anchor + depth)[rows].argsort(stable=True)]
        scored, multiple = len(rows), self._multiple()
        arguments = padded(arguments, multiple)
        rows = torch.cat([rows, rows[-1:].expand(-scored % multiple)])  # the last one again, whose scores are dropped
        anchor, depth, labels = anchor[rows], depth[rows], labels[rows]
        places = anchor + 1 + depth
        # The draft token before each, as it is when it was right; none at depth 0, where it is no draft.
        previous = self.draft_label(row["input_ids"][0, places]).masked_fill(depth == 0, -100)

        # In float32 throughout: autocast would round the teacher and entropies, which differ by less than that from a loss.
        @torch.autocast(self.args.device.type, enabled=False)
        def score(logits, part):
            logits = logits.float()
            if self.model.config.markov_rank:
                logits = logits + self.model.markov_head(previous[part])
            place, shared = torch.unique_consecutive(places[part], return_inverse=True)
            teacher = self.signals.distribution(row["hidden"][0, place]).take(shared)
            label = self.draft_label(labels[part])
            if self.calibration is not None and not self.model.training:
                self.calibration.add(depth[part], logits, label)
            losses = LOSSES[self.args.loss](logits, teacher, label)
            # As good as an argmax, at a third of its time.
            best = logits.detach().amax(dim=-1) == logits.detach().gather(1, label.clamp(min=0)[:, None])[:, 0]
            correct = (best & (label >= 0)).float()
            accepted = torch.zeros_like(correct)
            if self.args.depth_weights == "survival":
                accepted = acceptance(logits.detach(), teacher)
            return torch.stack([losses, accepted, correct])

        cache = DynamicCache()
        for layer in range(len(given) // 2):
            cache.update(given[2 * layer], given[2 * layer + 1], layer)
        output = model(**arguments, cache=cache, rows=rows, score=score)
        losses, accepted, correct = output.scores[:, :scored]
        anchor, depth = anchor[:scored], depth[:scored]
        weights = WEIGHTS[self.args.depth_weights](anchor, depth, accepted.detach())
        self._record(depth, correct.detach())
        return (losses * weights).sum() * scale, keys_and_values(cache)

    def _multiple(self) -> int:
        """What slots and rows are padded to a multiple of: half precision has its products compiled for every shape on a CPU.

        A sequential drafter reads its slots in waves, which are what they are.
        """
        half = self.args.bf16 or self.args.fp16
        return 64 if half and self.model.training and self.model.config.parallel_drafting else 1

    def draft_label(self, labels: torch.LongTensor) -> torch.LongTensor:
        """Target ids to indices into the draft vocabulary, -100 where a token is not in it."""
        index = torch.searchsorted(self.draft_ids, labels).clamp(max=len(self.draft_ids) - 1)
        return index.masked_fill(self.draft_ids[index] != labels, -100)

    def create_optimizer(self, model=None):
        fresh = self.optimizer is None
        if self.args.muon and self.is_fsdp_enabled:
            raise ValueError("--muon moves whole matrices, which FSDP spreads: drop one of them.")
        adamw = super().create_optimizer(model)
        if fresh and self.args.muon:
            self.optimizer = MuonWithAdamW(
                adamw, matrices_of(self.model if model is None else model), self.args.weight_decay
            )
        return self.optimizer

    def _get_train_sampler(self, train_dataset=None):
        if isinstance(self.train_dataset, FeatureShards):
            return ShardShuffle(self.train_dataset, self.args.seed)
        return super()._get_train_sampler(train_dataset)

    def _record(self, depth, correct):
        metrics = self._metrics["train" if self.model.training else "eval"]
        for d in range(self.model.config.num_depths):
            at_depth = depth == d
            metrics[f"accuracy_depth_{d}"].append((correct[at_depth].sum().item(), int(at_depth.sum())))

    def forget_metrics(self):
        for counts in self._metrics.values():
            counts.clear()

    def get_decay_parameter_names(self, model):
        """Without the embeddings: with `mask_row`, decay would shrink the rows that are not trained."""
        return [name for name in super().get_decay_parameter_names(model) if "embed_tokens" not in name]

    def log(self, logs: dict, start_time: float | None = None):
        """Adds the share of correct top-1 draft tokens per depth since the last log, over this process' slots."""
        mode = "train" if self.model.training else "eval"
        prefix = "" if mode == "train" else "eval_"
        for name, counts in self._metrics[mode].items():
            right, total = map(sum, zip(*counts))
            logs[prefix + name] = round(right / max(total, 1), 4)
        self._metrics[mode].clear()
        super().log(logs, start_time)

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        with torch.random.fork_rng(devices=[]):  # or training would go on with another noise than without this
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        # Every process decodes all prompts, as a drafter that is spread over processes needs them in step.
        if self.prompts:
            judged = decode(self.signals.target, self.model, self.prompts, self.args.eval_new_tokens)
            output.metrics.update({f"{metric_key_prefix}_{name}": round(value, 4) for name, value in judged.items()})
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return self.compute_loss(model, self._prepare_inputs(inputs)), None, None


def keys_and_values(cache: DynamicCache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def padded(slots: dict, multiple: int) -> dict:
    """The drafter's arguments with further slots behind, up to a multiple: no slot sees them, and nothing reads them."""
    extra = -slots["input_ids"].shape[1] % multiple
    fill = {name: F.pad(slots[name], (0, extra)) for name in ("input_ids", "feature_index", "position_ids")}
    # They see all, as a softmax over nothing is not a number.
    return slots | fill | {"visible": F.pad(F.pad(slots["visible"], (0, extra)), (0, 0, 0, extra), value=True)}


def noisy(features: torch.Tensor, share: float) -> torch.Tensor:
    """With uniform noise of up to `share` of each token's root mean square (features differ in scale by layer and token)."""
    scale = features.float().pow(2).mean(dim=-1, keepdim=True).sqrt().to(features)
    return features + share * scale * (2 * torch.rand_like(features) - 1)
