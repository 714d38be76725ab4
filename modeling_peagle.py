"""The P-EAGLE drafter: EAGLE-3's decoder over target features, with mask slots that draft K tokens in one forward.

A *slot* is one row of the drafter's input, named by its anchor (a position of the real sequence) and its depth:

    depth 0       the target's features at the anchor, with the embedding of the token after it; predicts the next one
    depth d >= 1  nothing is known yet: one learned `mask_hidden` with the embedding of one reserved token

Slot (a, d) stands at RoPE position a + d and predicts token a + 2 + d. Three facts are shared by training and decoding
and live here once: what a slot holds ([`slot_layout`]), what it sees ([`slot_visibility`]), and which layers of the target
feed it (`default_layer_ids`). Paper: https://huggingface.co/papers/2602.01469. A drafter may draft one token after the other
as well, and its deeper slots then hold what it has drafted: `modeling_peagle_sequential.py`.

[`Drafter`] is what this drafter shares with the one whose body is a pretrained language model
(`modeling_peagle_backbone.py`).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import (
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils import SAFE_WEIGHTS_NAME, ModelOutput, cached_file


# The repository root is both a folder of scripts and a remote-code package; only this form of import serves both.
try:
    from .attach_peagle import attach, prepare_for
    from .configuration_peagle import DrafterConfig, PEagleConfig
    from .generation_peagle import speculative_generate
    from .heads_peagle import FrozenHeadScore, MarkovHead
    from .layers_peagle import PEagleFirstLayer, PEagleLayer
    from .modeling_peagle_sequential import best, read_in_waves
    from .published_peagle import RENAMED, UNREAD, check_weights
except ImportError:
    from attach_peagle import attach, prepare_for
    from configuration_peagle import DrafterConfig, PEagleConfig
    from generation_peagle import speculative_generate
    from heads_peagle import FrozenHeadScore, MarkovHead
    from layers_peagle import PEagleFirstLayer, PEagleLayer
    from modeling_peagle_sequential import best, read_in_waves
    from published_peagle import RENAMED, UNREAD, check_weights


# Where the Markov head of a finished drafter is.
MARKOV_FILE = "markov_head/model.safetensors"
# Logits that training holds at a time (64 MB in float32); of more rows, the head's work is done again for the gradient.
MAX_LOGITS = 2**24
# Rows of the head at a time where it is frozen: few enough for their logits to stay in a processor's cache.
FUSED_ROWS = 512


def slot_layout(input_ids, position_ids, anchor, depth, mask_token_id: int | None, first_slot: bool = False):
    """What each slot holds, and where it stands: behind as many others as its document has real slots before it.

    Args:
        input_ids (`torch.LongTensor` of shape `(tokens,)`): Real tokens; documents may be packed one after the other.
        position_ids (`torch.LongTensor` of shape `(tokens,)`): Their positions, restarting with each document.
        anchor (`torch.LongTensor` of shape `(slots,)`): Index into `input_ids`, at most `tokens - 2`. That of the first
            token's slot is the one before the document, -1 for the first.
        depth (`torch.LongTensor` of shape `(slots,)`): 0 for a slot with real features, 1 and more for mask slots.
        mask_token_id (`int`, *optional*): The reserved token of mask slots. If None, a deeper slot holds the token after
            that of the depth before; then chains are whole, and slots ordered by depth and anchor.
        first_slot (`bool`): Whether the first token of a document has a real slot, although it has no features.

    Returns:
        `(slot_ids, feature_index, slot_positions)`, three `torch.LongTensor` of shape `(slots,)`: the token whose
        embedding enters, which features enter (0 for `mask_hidden`, `1 + anchor` for the target's, `-n` for what the drafter
        puts out `n` slots before this one), and the RoPE position.
    """
    masked, position = depth > 0, position_ids[anchor + 1]
    if mask_token_id is None:
        order = depth * len(input_ids) + anchor
        back = torch.searchsorted(order, order - len(input_ids)) - torch.arange(len(order), device=order.device)
        return input_ids[anchor + 1 + depth], torch.where(masked, back, anchor + 1), position + depth - 1
    slot_ids = input_ids[anchor + 1].masked_fill(masked, mask_token_id)
    feature_index = (anchor + 1).masked_fill(masked | (position == 0), 0)
    return slot_ids, feature_index, position + depth - int(not first_slot)


def slot_visibility(query_anchor, query_depth, key_anchor, key_depth):
    """The attention rule: the real slots up to the query's own anchor, then the query's own chain up to itself.

    Training evaluates it for all sampled slots at once, decoding for one round against the cache. Arguments broadcast
    (typically `(queries, 1)` against `(1, keys)`, integer tensors); the result is a `torch.BoolTensor`, True where the
    query attends to the key. Packed training also requires that both belong to one document.
    """
    context = (key_depth == 0) & (key_anchor <= query_anchor)
    own_chain = (key_anchor == query_anchor) & (key_depth <= query_depth)
    return context | own_chain


@dataclass
class PEagleOutput(ModelOutput):
    """
    logits (`torch.FloatTensor` of shape `(batch, rows, draft_vocab_size)`): Scores over the draft vocabulary.
    last_hidden_state (`torch.FloatTensor` of shape `(batch, rows, hidden_size)`): After the final norm.
    cache (`Cache`, *optional*): The cache that was passed in.
    scores (`torch.Tensor`, *optional*): In place of the logits, what `score` made of them, `(..., rows)`.
    """

    logits: torch.FloatTensor | None = None
    last_hidden_state: torch.FloatTensor | None = None
    cache: Cache | None = None
    scores: torch.Tensor | None = None


def _file_of(folder, name: str, kwargs: dict, **how) -> str | None:
    """A file of a folder or a repository of the Hub, with what `kwargs` of `from_pretrained` say about the place."""
    hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    return cached_file(folder, name, **{key: kwargs[key] for key in hub if key in kwargs}, **how)


class Drafter:
    """What all drafters do, a mixin before a [`PreTrainedModel`] with a [`DrafterConfig`].

    The model adds its parts by [`_add_fusion`] and [`_add_head`], and defines `forward` as [`PEagleModel.forward`].
    """

    config: DrafterConfig
    main_input_name = "input_ids"
    # Slots attend by an explicit 4D mask, which these kernels do not take.
    _supports_flash_attn = False
    _supports_flex_attn = False
    # A prompt is read in pieces of this many slots, so that the attention mask stays far below prompt x prompt.
    max_slots = 1024

    attach = attach
    prepare_for = prepare_for
    speculative_generate = speculative_generate

    def _add_fusion(self, width: int, eps: float):
        config = self.config
        if config.parallel_drafting:
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, config.num_features))
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                LlamaRMSNorm(config.target_hidden_size, eps=eps) for _ in range(config.num_feature_layers)
            )
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(config.num_features, eps=eps)
        self.fc = nn.Linear(config.num_features, width, bias=False)

    def _add_head(self, width: int):
        self.lm_head = nn.Linear(width, self.config.draft_vocab_size, bias=False)
        if self.config.draft_vocab_size < self.config.vocab_size:
            # Offsets, not ids: draft token i is target token i + d2t[i] (vLLM refuses the tensor for a full vocabulary).
            self.register_buffer("d2t", torch.zeros(self.config.draft_vocab_size, dtype=torch.long))
        if self.config.markov_rank:
            self.markov_head = MarkovHead(self.config.draft_vocab_size, self.config.markov_rank)

    def _keep_whole(self, layers):
        """Layers are not split over devices. Only kinds that are there: FSDP refuses to wrap one that it does not find."""
        self._no_split_modules = {type(layer).__name__ for layer in layers}

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            if self.config.parallel_drafting:
                init.normal_(self.mask_hidden)
            if self.config.markov_rank:
                init.normal_(self.markov_head.given.weight)
                init.zeros_(self.markov_head.next.weight)

    def _take_head(self, weight: torch.Tensor, draft_ids: torch.LongTensor | None):
        """Copies the draft vocabulary's rows of a head `(at least vocab_size, width)`, fitted to the drafter's width."""
        if draft_ids is not None and self.config.draft_vocab_size < self.config.vocab_size:
            self.d2t.copy_(draft_ids - torch.arange(self.config.draft_vocab_size))
        self.lm_head.weight.copy_(fit_width(weight.float()[self.draft_ids()], self.lm_head.in_features))

    def __getattr__(self, name):
        # The first thing that transformers asks of an assistant it does not know. Without this, the user would read that
        # the drafter "has no attribute 'generation_config'".
        if name == "generation_config":
            raise AttributeError(
                "A P-EAGLE drafter reads the target's hidden states, so it has to be attached first: call "
                "`drafter.attach(target)`, then `target.generate(..., assistant_model=drafter)`."
            )
        return super().__getattr__(name)

    def draft_ids(self) -> torch.LongTensor:
        """Target ids of the draft vocabulary, shape `(draft_vocab_size,)`, ascending."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.device)
        return ids + self.d2t if self.config.draft_vocab_size < self.config.vocab_size else ids

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Target features `(..., layers * target_hidden_size)` to the drafter's width `(..., hidden_size)`."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.split(self.config.target_hidden_size, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(features)

    def fused(self, features) -> torch.Tensor:
        """What `feature_index` of [`slot_layout`] counts, `(batch, 1 + tokens, hidden_size)`."""
        features = features.to(self.dtype)
        if not self.config.parallel_drafting:
            return F.pad(self.fuse(features), (0, 0, 1, 0))
        # All mask slots share one input, so it is fused once and not once per slot.
        return self.fuse(torch.cat([self.mask_hidden.expand(features.shape[0], -1, -1), features], dim=1))

    def slot_features(self, features, feature_index) -> torch.Tensor:
        """The fused half of each slot, `(batch, slots, hidden_size)`; for the arguments see [`PEagleModel.forward`]."""
        fused = self.fused(features)
        return fused.gather(1, feature_index[..., None].expand(-1, -1, fused.shape[-1]))

    def attention_mask(self, visible: torch.BoolTensor) -> torch.Tensor:
        """`(batch, slots, keys)` to what the attention takes, `(batch, 1, slots, keys)`."""
        mask = visible[:, None]
        if self.config._attn_implementation == "eager":
            mask = torch.where(mask, 0.0, torch.finfo(self.dtype).min).to(self.dtype)
        return mask

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Scores `(..., draft_vocab_size)` of hidden states `(..., hidden_size)`."""
        return self.lm_head(hidden_states)

    def _output(self, hidden_states: torch.Tensor, cache, score) -> PEagleOutput:
        output = PEagleOutput(last_hidden_state=hidden_states, cache=cache)
        if score is None:
            output.logits = self.head(hidden_states)
        else:
            output.scores = self._score(hidden_states[0], score)
        return output

    def _score(self, hidden_states: torch.Tensor, score) -> torch.Tensor:
        rows, size = len(hidden_states), max(MAX_LOGITS // self.config.draft_vocab_size, 1)
        if not (self.config.markov_rank or any(parameter.requires_grad for parameter in self.lm_head.parameters())):
            return FrozenHeadScore.apply(hidden_states, self.head, score, min(size, FUSED_ROWS))

        def part(hidden_states, rows):
            return score(self.head(hidden_states), rows)

        if rows <= size:
            return part(hidden_states, slice(0, rows))
        parts = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
        return torch.cat([checkpoint(part, hidden_states[p], p, use_reentrant=False) for p in parts], dim=-1)

    def slots(self, input_ids, verified: int, cached: int, num_tokens: int):
        """The slots of one round: every newly verified one, then the chain of `num_tokens - 1` further ones at the last one.

        Args:
            input_ids (`torch.LongTensor` of shape `(verified + 1,)`): See [`draft`].
            verified (`int`), cached (`int`): Verified tokens that are new, and slots before them.

        Returns:
            What [`slot_layout`] returns, and the `torch.BoolTensor` of shape `(slots, cached + slots)` of [`slot_visibility`].
        """
        first_slot, device = int(self.config.first_slot), self.device
        read = max(cached - first_slot, 0)  # tokens before these
        slots = torch.arange(-1 if first_slot and not cached else 0, verified + num_tokens - 1, device=device)
        anchor = slots.clamp(max=verified - 1)
        depth = slots - anchor
        position_ids = read + torch.arange(verified + 1, device=device)
        input_ids = F.pad(input_ids, (0, num_tokens - 1))  # tokens that are yet to be drafted
        layout = slot_layout(input_ids, position_ids, anchor, depth, self.config.mask_token_id, first_slot)
        key_anchor = torch.cat([torch.arange(cached, device=device) - first_slot, read + anchor])
        key_depth = F.pad(depth, (cached, 0))
        return *layout, slot_visibility((read + anchor)[:, None], depth[:, None], key_anchor, key_depth)

    @torch.no_grad()
    def draft(
        self, input_ids, features, num_tokens: int, cache: Cache, embedding=None, pick: Callable = best
    ) -> torch.Tensor:
        """Scores of the next `num_tokens` tokens, from one forward over the newly verified slots and the mask slots.

        Args:
            input_ids (`torch.LongTensor` of shape `(verified + 1,)`): The tokens that the target has read since the last
                call (all tokens, at the first), and the newest token, which it has not read yet.
            features (`torch.Tensor` of shape `(1, verified, layers * target_hidden_size)`): The target's features at the
                former.
            num_tokens (`int`): Draft tokens K.
            cache (`Cache`): The drafter's own. Holds verified slots only: mask slots are removed again before returning.
            embedding (`torch.Tensor` of shape `(vocab_size, hidden_size)`, *optional*): See [`forward`].
            pick (`Callable`): How a sequential drafter picks each token but the last, see [`choose`].

        Returns:
            `torch.Tensor` of shape `(num_tokens, draft_vocab_size)`: Row `d` scores the token `d + 1` after the newest,
            whatever the tokens between them are (of a sequential drafter: if they are those that were picked); [`choose`]
            makes a chain of them.
        """
        while features.shape[1] > self.max_slots:
            self.draft(input_ids[: self.max_slots + 1], features[:, : self.max_slots], 1, cache, embedding)
            input_ids, features = input_ids[self.max_slots :], features[:, self.max_slots :]
        slots = self.slots(input_ids, features.shape[1], cache.get_seq_length(), num_tokens)
        slot_ids, feature_index, slot_positions, visible = slots
        output = self(
            slot_ids[None],
            features,
            feature_index[None],
            slot_positions[None],
            visible[None],
            embedding=embedding,
            cache=cache,
            rows=slice(-num_tokens, None),
            pick=pick,
        )
        cache.crop(1 - num_tokens)
        return output.logits[0]

    def choose(self, logits: torch.Tensor, pick: Callable = best) -> torch.LongTensor:
        """The chain of draft tokens, as indices into the draft vocabulary `(K,)`, given the scores of [`draft`].

        `pick` takes an index from each row of scores `(rows, draft_vocab)`, that of the best one if unset. With a Markov head
        the scores of every depth depend on what was picked at the one before it.
        """
        if not self.config.markov_rank:
            return pick(logits)
        chosen = [pick(logits[:1])]
        for scores in logits[1:, None]:
            chosen.append(pick(scores + self.markov_head(chosen[-1])[:, : logits.shape[1]]))
        return torch.cat(chosen)

    def save_pretrained(self, save_directory, *args, state_dict: dict | None = None, **kwargs):
        """As [`~PreTrainedModel.save_pretrained`], with the Markov head in a folder of its own.

        Engines that serve the rest, such as vLLM, refuse tensors that they do not know. Who names the `state_dict`, as the
        Trainer does for a checkpoint to resume from, gets all of it in one file.
        """
        if state_dict is None and self.config.markov_rank:
            tensors = self.state_dict()
            head = {name: tensors.pop(name).contiguous() for name in list(tensors) if name.startswith("markov_head.")}
            os.makedirs(os.path.join(save_directory, os.path.dirname(MARKOV_FILE)), exist_ok=True)
            save_file(head, os.path.join(save_directory, MARKOV_FILE), metadata={"format": "pt"})
            state_dict = tensors
        # Under our names of the tensors, whatever they were called in the checkpoint that was loaded.
        kwargs = {"save_original_format": False} | kwargs
        super().save_pretrained(save_directory, *args, state_dict=state_dict, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As [`~PreTrainedModel.from_pretrained`], refusing a checkpoint that does not hold exactly this model's tensors.

        Raises:
            OSError: The weights file is missing, truncated, or has tensors missing, unknown or of another shape; or its
                draft vocabulary is none; or what [`check_weights`] refuses, or NaN or inf.
        """
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path,
                *args,
                **{"key_mapping": RENAMED} | kwargs | {"output_loading_info": True, "ignore_mismatched_sizes": True},
            )
        except SafetensorError as error:
            raise OSError(
                f"The weights in {pretrained_model_name_or_path} are damaged ({error}). The file is probably truncated: "
                "download or copy it again."
            ) from error
        if model._markov_head_is_apart:
            model._load_markov_head(pretrained_model_name_or_path, kwargs)
        faults = {
            "missing": info["missing_keys"],
            "unknown": info["unexpected_keys"],
            "misshapen": [name for name, *_ in info["mismatched_keys"]],
        }
        for kind, names in faults.items():
            if names:
                raise OSError(
                    f"The checkpoint in {pretrained_model_name_or_path} does not match its config.json, {kind} tensors: "
                    f"{', '.join(sorted(names)[:8])}. Use the config.json and model.safetensors of one training run."
                )
        ids = model.draft_ids()
        if not ids.is_meta and ((ids.diff() < 1).any() or ids[0] < 0 or ids[-1] >= model.config.vocab_size):
            raise OSError(
                f"The tensor d2t in {pretrained_model_name_or_path} is damaged: it must give ascending token ids below "
                f"{model.config.vocab_size}. Download or copy the weights again."
            )
        weights = _file_of(
            pretrained_model_name_or_path, SAFE_WEIGHTS_NAME, kwargs, _raise_exceptions_for_missing_entries=False
        )
        try:
            if weights is not None and not ids.is_meta:  # other kinds of files hold what they hold
                check_weights(weights, cls.base_model_prefix, ids.cpu())
            for name, tensor in model.state_dict().items():
                if not tensor.is_meta and not tensor.isfinite().all():
                    raise ValueError(f"{name} holds NaN or inf")
        except ValueError as error:
            raise OSError(
                f"In the checkpoint in {pretrained_model_name_or_path} {error}. Download or copy it again."
            ) from error
        return (model, info) if output_loading_info else model

    def _adjust_missing_and_unexpected_keys(self, loading_info):
        super()._adjust_missing_and_unexpected_keys(loading_info)
        # What is in a file of its own is not to be reported as missing.
        apart = {name for name in loading_info.missing_keys if name.startswith("markov_head.")}
        loading_info.missing_keys -= apart
        self._markov_head_is_apart = bool(apart)
        if self.config.own_embeddings is None:  # others have published it
            loading_info.unexpected_keys -= UNREAD
            fits = self.config.hidden_size == self.config.target_hidden_size
            self.config.own_embeddings = not (fits and "embed_tokens.weight" in loading_info.missing_keys)
            if not self.config.own_embeddings:
                del self.embed_tokens
                loading_info.missing_keys.remove("embed_tokens.weight")

    def _load_markov_head(self, folder, kwargs: dict):
        """From the file of its own in a folder or a repository of the Hub, with the options of `from_pretrained`."""
        try:
            path = _file_of(folder, MARKOV_FILE, kwargs)
            tensors = {name.removeprefix("markov_head."): tensor for name, tensor in load_file(path).items()}
            self.markov_head.load_state_dict(tensors)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise OSError(
                f"The Markov head that config.json of {folder} names cannot be read from {MARKOV_FILE} ({error}). Copy or "
                "download the whole folder again."
            ) from error


class PEagleModel(Drafter, LlamaPreTrainedModel):
    """
    The drafter. Load it with `AutoModel.from_pretrained(folder, trust_remote_code=True)`, then
    `drafter.attach(target)` makes `target.generate(**inputs, assistant_model=drafter)` decode speculatively.

    The names and shapes of its tensors are those of vLLM's EAGLE-3 loader, so the folder is served as it is. Unless
    `config.own_embeddings`, the checkpoint holds no embedding table: callers pass the target's.
    """

    config: PEagleConfig
    base_model_prefix = "peagle"

    def __init__(self, config: PEagleConfig):
        super().__init__(config)
        if config.own_embeddings is not False:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self._add_fusion(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            [PEagleFirstLayer(config)] + [PEagleLayer(config, i) for i in range(1, config.num_hidden_layers)]
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._add_head(config.hidden_size)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()
        self._keep_whole(self.layers)

    def get_input_embeddings(self):
        return self.embed_tokens if self.config.own_embeddings else None

    def forward(
        self,
        input_ids: torch.LongTensor,
        features: torch.Tensor,
        feature_index: torch.LongTensor,
        position_ids: torch.LongTensor,
        visible: torch.BoolTensor,
        embedding: torch.Tensor | None = None,
        cache: Cache | None = None,
        rows: slice | torch.LongTensor = slice(None),
        score: Callable[[torch.Tensor, slice], torch.Tensor] | None = None,
        pick: Callable | None = None,
    ) -> PEagleOutput:
        """One pass over slots (see [`slot_layout`] for the first, third and fourth argument).

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, slots)`): Token half of each slot.
            features (`torch.Tensor` of shape `(batch, tokens, layers * target_hidden_size)`): Hidden states of the target
                at `eagle_aux_hidden_state_layer_ids`, concatenated in that order. Cast to the drafter's dtype.
            feature_index (`torch.LongTensor` of shape `(batch, slots)`): 0 for `mask_hidden`, `1 + i` for row `i`, `-n` for
                the drafter's own output `n` slots before.
            position_ids (`torch.LongTensor` of shape `(batch, slots)`): RoPE positions.
            visible (`torch.BoolTensor` of shape `(batch, slots, cached + slots)`): From [`slot_visibility`].
            embedding (`torch.Tensor` of shape `(vocab_size, hidden_size)`, *optional*): The target's embedding table,
                unless the drafter has its own.
            cache (`Cache`, *optional*): Keys and values of earlier slots; these are appended.
            rows (`slice` or `torch.LongTensor`): The slots to score; the head is as large as all layers together.
            score (`Callable`, *optional*): For training a batch of 1, takes the logits `(n, draft_vocab_size)` of some of the
                rows and which ones (a `slice`), and returns a tensor `(..., n)`. The logits of all rows never exist at once.
            pick (`Callable`, *optional*): For decoding with a sequential drafter, see [`read_in_waves`].
        """
        if self.config.parallel_drafting:
            hidden_states = self.slot_features(features, feature_index)
            hidden_states = self.through_layers(
                hidden_states, input_ids, position_ids, visible, embedding, cache, rows
            )
        else:
            slots = input_ids, features, feature_index, position_ids, visible
            hidden_states, logits = read_in_waves(self, *slots, embedding, cache, pick)
            if logits is not None:
                return PEagleOutput(logits=logits, cache=cache)
            hidden_states = hidden_states[:, rows]
        return self._output(self.norm(hidden_states), cache, score)

    def through_layers(
        self, hidden_states, input_ids, position_ids, visible, embedding, cache, rows=slice(None)
    ) -> torch.Tensor:
        """What the layers make of `rows` of slots whose fused half is `hidden_states`; for the arguments see [`forward`]."""
        table = self.embed_tokens.weight if self.config.own_embeddings else embedding
        # A target may be padded with rows that the drafter's own table lacks; what stands for them does not matter.
        inputs_embeds = F.embedding(input_ids.clamp(max=len(table) - 1), table).to(self.dtype)
        shared = {
            "attention_mask": self.attention_mask(visible),
            "position_embeddings": self.rotary_emb(hidden_states, position_ids),
            "cache": cache,
        }
        rows_of = [slice(None)] * (len(self.layers) - 1) + [rows]
        hidden_states = self.layers[0](hidden_states, rows_of[0], inputs_embeds=inputs_embeds, **shared)
        for layer, read in zip(self.layers[1:], rows_of[1:]):
            hidden_states = layer(hidden_states, read, **shared)
        return hidden_states

    @classmethod
    @torch.no_grad()
    def from_target(cls, target, config: PEagleConfig, draft_ids: torch.LongTensor | None = None) -> "PEagleModel":
        """A fresh drafter with the target's head rows and embeddings. Its norms and layers start from scratch, see
        [`take_layers`].

        Args:
            target (`PreTrainedModel`): The frozen target.
            config (`PEagleConfig`): See [`PEagleConfig.for_target`].
            draft_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`, *optional*): Target ids of the draft vocabulary,
                distinct and ascending; None for the full vocabulary.
        """
        model = cls(config).float()
        model._take_head(target.get_output_embeddings().weight, draft_ids)
        if config.own_embeddings:
            table = target.get_input_embeddings().weight.float()
            model.embed_tokens.weight.copy_(fit_width(table, config.hidden_size))
        return model

    @torch.no_grad()
    def take_layers(self, target):
        """Copies the target's final norm and last layers, as far as their parts have the same names and shapes.

        On request only: with SmolLM2 the start became worse (tau after 48,000 tokens 1.20 with the norm and 1.15 with the
        layer, against 1.21 from scratch). Parts that a Llama layer lacks, such as Qwen3's and Gemma-3's further norms, stay
        out; the first layer's token half starts at zero.

        Raises:
            ValueError: The drafter has more layers than the target, or is of another width.
        """
        decoder = target.get_decoder()
        ours, theirs = [*self.layers, self.norm], [*decoder.layers[-len(self.layers) :], decoder.norm]
        if len(ours) != len(theirs) or self.config.hidden_size != self.config.target_hidden_size:
            raise ValueError(
                f"A drafter of {len(ours) - 1} layers of width {self.config.hidden_size} cannot start from the layers of a "
                f"target of {len(theirs) - 1} of width {self.config.target_hidden_size}."
            )
        shift = float(decoder.config.model_type.startswith("gemma3"))  # its norms scale by 1 + weight
        for part, source in zip(ours, theirs):
            tensors = source.state_dict()
            # Gemma-3 has a norm before the MLP under a name of its own, and one after the attention under Llama's.
            tensors["post_attention_layernorm.weight"] = tensors.get(
                "pre_feedforward_layernorm.weight", tensors.get("post_attention_layernorm.weight")
            )
            for name, parameter in part.named_parameters():
                tensor = tensors.get(name.replace("hidden_norm", "input_layernorm"))
                if tensor is None:
                    continue
                if tensor.dim() == 1:
                    tensor = tensor + shift
                if tensor.dim() == 2 and parameter.shape[1] == 2 * tensor.shape[1]:
                    tensor = F.pad(tensor, (tensor.shape[1], 0))
                if tensor.shape == parameter.shape:
                    parameter.copy_(tensor)


def fit_width(table: torch.Tensor, width: int) -> torch.Tensor:
    """`(rows, target width)` to `(rows, width)`, keeping the inner products of rows as well as `width` allows.

    The same table if the widths agree; else its coordinates along the leading principal directions, zero-padded.
    """
    if table.shape[1] == width:
        return table
    _, directions = torch.linalg.eigh(table.T @ table)
    projected = table @ directions.flip(1)[:, :width]
    return F.pad(projected, (0, width - projected.shape[1]))


PEagleModel.register_for_auto_class("AutoModel")
