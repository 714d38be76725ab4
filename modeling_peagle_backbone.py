"""A drafter whose body is a pretrained small language model: what it read in pretraining, it need not learn here.

Its slots, its attention rule and its decoding are those of `modeling_peagle.py`. The target's features are added to the
embeddings of the tokens; as the fusion starts at zero, the untrained drafter is the plain language model. To be that, it
reads a text from its first token on, in a slot without features.
"""

import torch
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init


# The repository root is both a folder of scripts and a remote-code package; only this form of import serves both.
try:
    from .configuration_peagle import PEagleBackboneConfig
    from .modeling_peagle import Drafter, PEagleOutput
except ImportError:
    from configuration_peagle import PEagleBackboneConfig
    from modeling_peagle import Drafter, PEagleOutput


class PEagleBackboneModel(Drafter, PreTrainedModel):
    """
    The drafter. Load it with `AutoModel.from_pretrained(folder, trust_remote_code=True)`, then
    `drafter.attach(target)` makes `target.generate(**inputs, assistant_model=drafter)` decode speculatively.
    """

    config: PEagleBackboneConfig
    _supports_sdpa = True

    def __init__(self, config: PEagleBackboneConfig):
        super().__init__(config)
        self.backbone = AutoModel.from_config(config.lm_config)
        self._add_fusion(config.lm_config.hidden_size, config.lm_config.rms_norm_eps)
        self._add_head(config.lm_config.hidden_size)
        self.post_init()
        self._keep_whole(self.backbone.layers)

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            init.zeros_(self.fc.weight)

    def get_input_embeddings(self):
        return self.backbone.get_input_embeddings()

    def attention_mask(self, visible, position_ids):
        """As the drafter's; for a backbone with sliding layers a dictionary of both kinds, as its `forward` takes it."""
        full = super().attention_mask(visible)
        lm = self.config.lm_config
        if "sliding_attention" not in getattr(lm, "layer_types", ()):  # some families have none
            return full
        # Cached are the real slots of one document, from its first on.
        cached = visible.shape[-1] - position_ids.shape[-1]
        read = torch.arange(cached, device=visible.device).expand(len(visible), -1)
        key_positions = torch.cat([read, position_ids], dim=-1)
        near = key_positions[:, None] > position_ids[..., None] - lm.sliding_window
        return {"full_attention": full, "sliding_attention": super().attention_mask(visible & near)}

    def head(self, hidden_states):
        logits, cap = super().head(hidden_states), getattr(self.config.lm_config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def forward(
        self,
        input_ids,
        features,
        feature_index,
        position_ids,
        visible,
        embedding=None,
        cache=None,
        rows=slice(None),
        score=None,
        pick=None,
    ) -> PEagleOutput:
        """As [`PEagleModel.forward`]. `embedding` is not needed, as the backbone has its own; all depths are drafted at once."""
        known = input_ids.clamp(max=self.config.vocab_size - 1)  # a target may be padded with further rows
        inputs_embeds = self.get_input_embeddings()(known) + self.slot_features(features, feature_index)
        hidden_states = self.backbone(
            inputs_embeds=inputs_embeds,
            attention_mask=self.attention_mask(visible, position_ids),
            position_ids=position_ids,
            cache=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        return self._output(hidden_states[:, rows], cache, score)

    @classmethod
    @torch.no_grad()
    def from_backbone(
        cls, backbone, config: PEagleBackboneConfig, draft_ids: torch.LongTensor | None = None
    ) -> "PEagleBackboneModel":
        """A fresh drafter that says what a language model says.

        Args:
            backbone (`PreTrainedModel`): The causal language model; it is copied.
            config (`PEagleBackboneConfig`): See [`PEagleBackboneConfig.for_backbone`].
            draft_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`, *optional*): Target ids of the draft vocabulary,
                distinct and ascending; None for the full vocabulary.
        """
        model = cls(config).float()
        model.backbone.load_state_dict(backbone.get_decoder().state_dict())
        model._take_head(backbone.get_output_embeddings().weight, draft_ids)
        return model


PEagleBackboneModel.register_for_auto_class("AutoModel")
