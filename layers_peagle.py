"""The drafter's layers: Llama's, of which each puts out only the slots that somebody reads.

Slots see each other by their keys and values alone. So of a slot that is not scored (in training that of depth 0 before a
token that is not supervised, in decoding that of a token of the prompt) the last layer makes nothing but these.
"""

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    eager_attention_forward,
    rotate_half,
)


def attend(attention: LlamaAttention, hidden_states, rows, position_embeddings, attention_mask, cache) -> torch.Tensor:
    """Llama's attention with keys and values of all slots, but queries of `rows` only, `(batch, rows, hidden_size)`."""

    def heads(projection, states):
        return projection(states).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

    cos, sin = (table[:, None] for table in position_embeddings)
    query = heads(attention.q_proj, hidden_states[:, rows])
    query = query * cos[:, :, rows] + rotate_half(query) * sin[:, :, rows]
    key, value = heads(attention.k_proj, hidden_states), heads(attention.v_proj, hidden_states)
    key = key * cos + rotate_half(key) * sin
    if cache is not None:
        key, value = cache.update(key, value, attention.layer_idx)
    kernel = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager_attention_forward)
    output = query.transpose(1, 2)
    if output.numel():
        output, _ = kernel(attention, query, key, value, attention_mask[:, :, rows], scaling=attention.scaling)
    else:  # kernels make an error of no query; and processes that learn together look for all that a loss may depend on
        output = output + 0 * (key.sum() + value.sum())
    return attention.o_proj(output.flatten(-2))


class PEagleLayer(LlamaDecoderLayer):
    """A Llama layer, `(batch, slots, hidden_size)` to `(batch, rows, hidden_size)`; further arguments are those of [`attend`]."""

    def forward(self, hidden_states, rows, **kwargs):
        return self.put_out(self.input_layernorm(hidden_states), hidden_states, rows, kwargs)

    def put_out(self, read, residual, rows, kwargs: dict) -> torch.Tensor:
        hidden_states = residual[:, rows] + attend(self.self_attn, read, rows, **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class PEagleFirstLayer(PEagleLayer):
    """A layer whose queries, keys and values read `[norm(embedding); norm(fused features)]`, 2H wide (EAGLE-3)."""

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            setattr(
                self.self_attn, name, nn.Linear(2 * config.hidden_size, narrow.out_features, narrow.bias is not None)
            )

    def forward(self, hidden_states, rows, inputs_embeds, **kwargs):
        normed = self.hidden_norm(hidden_states)
        residual = normed if self.norm_before_residual else hidden_states
        return self.put_out(torch.cat([self.input_layernorm(inputs_embeds), normed], dim=-1), residual, rows, kwargs)
