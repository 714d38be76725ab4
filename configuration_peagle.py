"""Configurations of P-EAGLE drafters: of one with layers of its own, and of one whose body is a pretrained language model.

Of the former one `config.json` serves two readers. Transformers loads it with `trust_remote_code=True` as a [`PEagleConfig`]; vLLM's
EAGLE-3 loader, which reads the same folder without our code, sees a `LlamaConfig` (hence `model_type: "llama"`) with
the extra keys that it looks for. P-EAGLE: https://huggingface.co/papers/2602.01469, EAGLE-3:
https://huggingface.co/papers/2503.01840.
"""

import copy
import hashlib
import json
import math

import torch
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec


# The repository root is both a folder of scripts and a remote-code package; only this form of import serves both.
try:
    from .published_peagle import published_fields
except ImportError:
    from published_peagle import published_fields


# Two models of one family may pad the same vocabulary to different sizes (Gemma-3: 262,144 and 262,208 rows). Sizes
# further apart than this belong to different tokenizers.
MAX_VOCAB_PADDING = 512
# The families whose attention masks `PEagleBackboneModel` knows.
BACKBONES = ("llama", "qwen3", "gemma3_text")


def default_layer_ids(num_layers: int) -> list[int]:
    """Which hidden states of the target the drafter reads, as indices into transformers' `output.hidden_states`.

    Index `i` is the residual stream that *enters* layer `i` (0 is the embeddings). The last index, `num_layers`, is never
    used: transformers returns it after the final norm, other engines before it. EAGLE-3, P-EAGLE and vLLM all take a low,
    a middle and a high layer, `[2, n // 2, n - 3]`; targets too shallow for that give what they have.

    Args:
        num_layers (`int`): Decoder layers of the target.

    Returns:
        `list[int]`: Distinct ascending ids below `num_layers`; three of them for every target of three layers or more.
    """
    if num_layers >= 7:
        return [2, num_layers // 2, num_layers - 3]
    if num_layers >= 4:
        return [1, num_layers // 2, num_layers - 1]
    return list(range(num_layers))


def tokenizer_fingerprint(tokenizer) -> str:
    """SHA-256 of a tokenizer's token-to-id table: equal exactly when two tokenizers give the ids the same meaning."""
    table = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(table.encode()).hexdigest()


@strict
class DrafterConfig(PreTrainedConfig):
    r"""
    What all drafters have in common.

    Args:
        vocab_size (`int`): Vocabulary of the *target* (rows of its embedding).
        target_hidden_size (`int`, *optional*): Width of the target; that of the drafter if unset.
        target_num_hidden_layers (`int`, *optional*): Layers of the target; checked when the drafter is attached.
        target_name_or_path (`str`, *optional*): The target that the drafter was trained for.
        target_tokenizer_hash (`str`, *optional*): [`tokenizer_fingerprint`] of the target's tokenizer.
        eagle_aux_hidden_state_layer_ids (`list[int]`, *optional*): See [`default_layer_ids`], which the target's layers say
            if unset; those of the first target that is checked, if these are not known either.
        draft_vocab_size (`int`, *optional*, defaults to `vocab_size`): Tokens that the drafter can propose.
        parallel_drafting (`bool`, *optional*): All depths are drafted in one forward, by mask slots, and not one after the
            other (EAGLE-3). If unset, whether there is a mask token.
        mask_token_id (`int`, *optional*): Reserved token of the target whose embedding stands in every slot of depth 1 and
            more; None for a drafter that does not draft in parallel.
        num_depths (`int`): Depths that the drafter was trained for (K_train).
        speculation_depth (`int`): Depth of drafts (K) that are not sized by cost, unless `num_assistant_tokens` says otherwise.
        fc_norm (`bool`): One RMSNorm per target layer before the fusion (EAGLE-3.1).
        norm_before_fc (`bool`): One RMSNorm over all target layers together before the fusion.
        markov_rank (`int`): Rank of the [`MarkovHead`]; 0 for none.
        draft_temperatures (`list[float]`, *optional*): Divisors of the scores of each of the `num_depths` depths that make
            the drafter as sure as it is right, see [`fit_temperature`]; 1 if unset.
    """

    vocab_size: int = 32000
    target_hidden_size: int | None = None
    target_num_hidden_layers: int | None = None
    target_name_or_path: str | None = None
    target_tokenizer_hash: str | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    draft_vocab_size: int | None = None
    parallel_drafting: bool | None = None
    mask_token_id: int | None = None
    num_depths: int = 8
    speculation_depth: int = 4
    fc_norm: bool = True
    norm_before_fc: bool = False
    markov_rank: int = 0
    draft_temperatures: list[float] | None = None

    # Whether the first token of a document has a slot, see `slot_layout`.
    first_slot = False

    def __post_init__(self, **kwargs):
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.eagle_aux_hidden_state_layer_ids is None and self.target_num_hidden_layers is not None:
            self.eagle_aux_hidden_state_layer_ids = default_layer_ids(self.target_num_hidden_layers)
        if self.parallel_drafting is None:
            self.parallel_drafting = self.mask_token_id is not None
        if not self.parallel_drafting:
            self.mask_token_id = None
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of `@strict`-powered validation: runs at construction and before every save."""
        super().validate_architecture()
        ids = self.eagle_aux_hidden_state_layer_ids
        if ids is not None and (not ids or ids != sorted(set(ids)) or ids[0] < 0):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids must be distinct and ascending, got {ids}.")
        if None not in (ids, self.target_num_hidden_layers) and ids[-1] >= self.target_num_hidden_layers:
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids {ids} reach beyond a target of {self.target_num_hidden_layers} layers: "
                f"use ids below {self.target_num_hidden_layers}."
            )
        if not 1 <= self.speculation_depth <= self.num_depths:
            raise ValueError(
                f"speculation_depth is {self.speculation_depth}; it must lie between 1 and num_depths ({self.num_depths}), "
                "the depths that the drafter is trained for."
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} must lie in 1..vocab_size ({self.vocab_size})."
            )
        mask = self.mask_token_id
        if self.parallel_drafting and (mask is None or not 0 <= mask < self.vocab_size):
            raise ValueError(
                f"mask_token_id {mask} must lie in 0..{self.vocab_size - 1} where parallel_drafting is set."
            )
        if self.markov_rank and not self.parallel_drafting:
            raise ValueError("A drafter that drafts one token after the other sees them all: set markov_rank=0.")
        temperatures = self.draft_temperatures
        if temperatures is not None and not (
            len(temperatures) == self.num_depths and all(0 < temperature < math.inf for temperature in temperatures)
        ):
            raise ValueError(
                f"draft_temperatures must be {self.num_depths} positive numbers, one for each depth of num_depths, got "
                f"{temperatures}."
            )

    @property
    def num_features(self) -> int:
        """Width of the concatenated target features that enter the fusion (before `fc`)."""
        return self.num_feature_layers * self.target_hidden_size

    @property
    def num_feature_layers(self) -> int:
        """How many hidden states of the target the drafter reads."""
        ids = self.eagle_aux_hidden_state_layer_ids
        return 3 if ids is None else len(ids)

    @property
    def sized_depth(self) -> int:
        """Depth of drafts that are sized by cost: in parallel all depths come at the price of one."""
        return self.num_depths if self.parallel_drafting else self.speculation_depth

    def check_depth(self, name: str, depth, source: str = "the call"):
        """Refuse a number of draft tokens per round that the drafter was not trained for; `name` and `source` say whose it is."""
        if type(depth) is not int or not 1 <= depth <= self.num_depths:
            raise ValueError(
                f"{name} is {depth!r} in {source}, but this drafter was trained for 1 to {self.num_depths} draft tokens per "
                f"round: pass {name} in that range."
            )

    def check_target(self, target, tokenizer=None):
        """Refuse a target that the drafter was not made for, or whose output a wider forward would change.

        Raises:
            ValueError: The target's width, depth, vocabulary or tokenizer differ; the message names both values. Or its RoPE
                frequencies depend on the length read so far.
        """
        text = target.config.get_text_config()
        rows = target.get_input_embeddings().weight.shape[0]
        made_for = f"This drafter was trained for {self.target_name_or_path or 'another target'}"
        fix = "Load the target it was trained for, or train a drafter for this one with train_peagle.py."
        if text.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"{made_for} with hidden size {self.target_hidden_size}, but this target's is {text.hidden_size}. {fix}"
            )
        if self.target_num_hidden_layers not in (None, text.num_hidden_layers):
            raise ValueError(
                f"{made_for} with {self.target_num_hidden_layers} layers, but this target has {text.num_hidden_layers}. {fix}"
            )
        if self.eagle_aux_hidden_state_layer_ids is None:
            self.eagle_aux_hidden_state_layer_ids = default_layer_ids(text.num_hidden_layers)
        if self.eagle_aux_hidden_state_layer_ids[-1] >= text.num_hidden_layers:
            raise ValueError(
                f"{made_for}: it reads hidden states {self.eagle_aux_hidden_state_layer_ids}, but this target has only "
                f"{text.num_hidden_layers} layers. {fix}"
            )
        if abs(rows - self.vocab_size) >= MAX_VOCAB_PADDING:
            raise ValueError(
                f"{made_for} with a vocabulary of {self.vocab_size}, but this target's has {rows} entries. {fix}"
            )
        if self.parallel_drafting and self.mask_token_id >= rows:
            raise ValueError(
                f"{made_for}: its mask_token_id is {self.mask_token_id}, but this target has only {rows} embeddings. {fix}"
            )
        # Gemma-3 keeps one set of RoPE parameters per kind of layer.
        rope = getattr(text, "rope_parameters", None) or {}  # some families have none
        for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
            # Drafts lengthen the text beyond what plain decoding has read when it looks at the same token.
            if kind.get("rope_type") in ("dynamic", "longrope"):
                raise ValueError(
                    f"This target's RoPE is {kind['rope_type']!r}, whose frequencies change with the length of the text, so "
                    "that checking several tokens at once would change its output. Decode it without a drafter."
                )
        if tokenizer is not None and self.target_tokenizer_hash is not None:
            if tokenizer_fingerprint(tokenizer) != self.target_tokenizer_hash:
                raise ValueError(
                    f"{made_for}, whose tokenizer gives the token ids another meaning than this one. {fix}"
                )


def target_fields(target, tokenizer) -> dict:
    """What a drafter's configuration says about its target."""
    text = target.config.get_text_config()
    return {
        "vocab_size": target.get_input_embeddings().weight.shape[0],
        "target_hidden_size": text.hidden_size,
        "target_num_hidden_layers": text.num_hidden_layers,
        "target_name_or_path": target.name_or_path,
        "target_tokenizer_hash": tokenizer_fingerprint(tokenizer),
        "eagle_aux_hidden_state_layer_ids": default_layer_ids(text.num_hidden_layers),
    }


@strict
class PEagleConfig(DrafterConfig, LlamaConfig):
    r"""
    A drafter with layers of its own, which the fields of [`LlamaConfig`] describe.

    Args (beside those of [`DrafterConfig`]):
        own_embeddings (`bool`, *optional*): The checkpoint carries `embed_tokens`. Otherwise the target's table is borrowed.
            None if only its tensors tell, as those that others published; loading it decides.
        norm_before_residual (`bool`): The first layer's residual stream starts from the normalised features.
        norm_output (`bool`): What a sequential drafter hands to the next depth is taken behind its final norm (EAGLE-3.1).
    """

    own_embeddings: bool | None = False
    norm_before_residual: bool = False
    norm_output: bool = False

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        return super().from_dict(published_fields(config_dict), **kwargs)

    def __post_init__(self, **kwargs):
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of `@strict`-powered validation: runs at construction and before every save."""
        super().validate_architecture()
        if self.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}: a drafter has at least one layer.")
        if self.own_embeddings is False and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"A drafter of width {self.hidden_size} cannot borrow the embeddings of a target of width "
                f"{self.target_hidden_size}: set own_embeddings=True."
            )

    def to_dict(self):
        """As the parent's, with the keys that vLLM's EAGLE-3 loader reads derived from our own fields.

        `save_pretrained` writes the Python class into `architectures`, which vLLM does not know, so it is set here: every
        way to a `config.json`, a Trainer checkpoint included, passes through this method.
        """
        ids, mask = self.eagle_aux_hidden_state_layer_ids, self.mask_token_id
        named = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": list(ids)}
        return (
            super().to_dict()
            | {
                "architectures": ["LlamaForCausalLMEagle3"],
                "eagle_config": {"use_aux_hidden_state": True} | named,
                "num_aux_hidden_states": self.num_feature_layers,
            }
            | ({"pard_token": mask, "ptd_token_id": mask} if self.parallel_drafting else {})
        )

    @classmethod
    def for_target(
        cls, target, tokenizer, *, mask_token_id: int | None, num_hidden_layers: int = 1, **kwargs
    ) -> "PEagleConfig":
        """A drafter configuration shaped after a target: same width, heads, MLP and RoPE base.

        Args:
            target (`PreTrainedModel`): A causal language model, or a composite one with a text model inside.
            tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer, whose hash is stored.
            mask_token_id (`int`, *optional*): See the class.
            num_hidden_layers (`int`): Layers of the drafter.
            kwargs: Any other field, taking precedence (`hidden_size`, `draft_vocab_size`, `num_depths`, ...).
        """
        text = target.config.get_text_config()
        # The drafter's RoPE only needs the target's base frequency; context-extension scalings stay the target's own.
        # Gemma-3 keeps one set of RoPE parameters per kind of layer.
        rope = text.rope_parameters.get("full_attention", text.rope_parameters)
        fields = {
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": text.num_key_value_heads,
            "head_dim": getattr(text, "head_dim", None),  # some families derive it
            "rms_norm_eps": text.rms_norm_eps,
            "max_position_embeddings": text.max_position_embeddings,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
            "bos_token_id": text.bos_token_id,
            "eos_token_id": text.eos_token_id,
            "pad_token_id": text.pad_token_id,
            "mask_token_id": mask_token_id,
            "num_hidden_layers": num_hidden_layers,
        }
        return cls(**fields | target_fields(target, tokenizer) | kwargs)


@strict
class PEagleBackboneConfig(DrafterConfig):
    r"""
    A drafter whose body is a pretrained language model. vLLM cannot serve it.

    Args (beside those of [`DrafterConfig`]):
        vocab_size (`int`): Rows of the target's embedding that the backbone's has too, as the padding may differ.
        lm_config (`PreTrainedConfig`): The backbone's own configuration.
        lora (`dict`, *optional*): In checkpoints of a LoRA training, its settings; the finished drafter is merged.
    """

    model_type = "peagle_backbone"
    sub_configs_defaults = {"lm_config": SubConfigSpec(AutoConfig, model_type="llama")}
    own_embeddings = True
    # A language model reads its text from the first token on.
    first_slot = True

    mask_token_id: int | None = 0
    lm_config: dict | PreTrainedConfig | None = None
    lora: dict | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.lm_config.hidden_size

    def validate_architecture(self):
        """Part of `@strict`-powered validation: runs at construction and before every save."""
        super().validate_architecture()
        if not self.parallel_drafting:
            raise ValueError("A language model as a drafter drafts in parallel: leave parallel_drafting unset.")

    @classmethod
    def for_backbone(
        cls, target, tokenizer, backbone, backbone_tokenizer, *, mask_token_id: int, **kwargs
    ) -> "PEagleBackboneConfig":
        """A drafter configuration around a backbone.

        Args:
            target (`PreTrainedModel`): A causal language model, or a composite one with a text model inside.
            tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer, whose hash is stored.
            backbone (`PreTrainedModel`): The causal language model that becomes the drafter.
            backbone_tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, which has to be the target's.
            mask_token_id (`int`): See the class.
            kwargs: Any other field, taking precedence (`draft_vocab_size`, `num_depths`, ...).

        Raises:
            ValueError: The backbone is of another family than those whose attention is known, or has another tokenizer.
        """
        lm_config, fields = copy.deepcopy(backbone.config.get_text_config()), target_fields(target, tokenizer)
        if lm_config.model_type not in BACKBONES:
            raise ValueError(f"A {lm_config.model_type} model cannot be a drafter; {', '.join(BACKBONES)} models can.")
        rows = backbone.get_input_embeddings().weight.shape[0]
        same = tokenizer_fingerprint(backbone_tokenizer) == fields["target_tokenizer_hash"]
        if not same or abs(rows - fields["vocab_size"]) >= MAX_VOCAB_PADDING:
            raise ValueError(
                f"The tokenizer of {backbone.name_or_path or 'the backbone'} gives the token ids another meaning than "
                f"that of {target.name_or_path or 'the target'}: choose a smaller model of the target's own family."
            )
        lm_config.dtype = torch.float32  # as it will be trained, in which nothing is rounded
        fields |= {"vocab_size": min(rows, fields["vocab_size"]), "mask_token_id": mask_token_id}
        return cls(**fields | {"lm_config": lm_config} | kwargs)


PEagleConfig.register_for_auto_class()
PEagleBackboneConfig.register_for_auto_class()
