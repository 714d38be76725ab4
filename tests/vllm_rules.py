"""A drafter as vLLM 0.32 reads its folder: an EAGLE-3 head by vLLM's names, shapes and defaults.

It is written from vLLM's rules (`model_executor/models/llama_eagle3.py`, `v1/spec_decode/llm_base_proposer.py`) with plain
torch and imports nothing of ours, so what both agree on stands in `config.json` and the weights. There is no cache: all slots
are computed anew.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


def vllm_table(said: dict) -> dict[str, tuple]:
    """Names and shapes of the tensors that vLLM has a place for under a `config.json`."""
    h, heads, kv = said["hidden_size"], said["num_attention_heads"], said["num_key_value_heads"]
    d, mlp, wide = said["head_dim"], said["intermediate_size"], said.get("target_hidden_size", said["hidden_size"])
    aux = said.get("num_aux_hidden_states") or len(layer_ids_of(said)) or 3
    table = {"fc.weight": (h, aux * wide), "norm.weight": (h,), "lm_head.weight": (draft_vocab_of(said), h)}
    table |= {"layers.0.hidden_norm.weight": (h,), "embed_tokens.weight": (said["vocab_size"], h)}
    if said.get("fc_norm"):
        table |= {f"fc_norm.{i}.weight": (wide,) for i in range(aux)}
    if norm_before_fc_of(said):
        table["input_norm.weight"] = (aux * wide,)
    if said["parallel_drafting"]:  # a serving option, which our config.json repeats
        table["mask_hidden"] = (1, 1, aux * wide)
    if draft_vocab_of(said) != said["vocab_size"]:
        table["d2t"] = (draft_vocab_of(said),)
    for i in range(said["num_hidden_layers"]):
        width = 2 * h if i == 0 else h
        attention = {"q_proj": (heads * d, width), "k_proj": (kv * d, width), "v_proj": (kv * d, width)}
        parts = {
            "self_attn": (attention | {"o_proj": (h, heads * d)}, said.get("attention_bias")),
            "mlp": ({"gate_proj": (mlp, h), "up_proj": (mlp, h), "down_proj": (h, mlp)}, said.get("mlp_bias")),
        }
        for part, (shapes, biased) in parts.items():
            for name, shape in shapes.items():
                table[f"layers.{i}.{part}.{name}.weight"] = shape
                if biased:
                    table[f"layers.{i}.{part}.{name}.bias"] = shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            table[f"layers.{i}.{norm}.weight"] = (h,)
    return table


def layer_ids_of(said: dict) -> list[int]:
    eagle = said.get("eagle_config") or {}
    return said.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids") or []


def draft_vocab_of(said: dict) -> int:
    return said.get("draft_vocab_size") or said["vocab_size"]


def norm_before_fc_of(said: dict) -> bool:
    return (said.get("eagle_config") or {}).get("norm_before_fc", said.get("norm_before_fc", False))


class VllmHead:
    """
    Raises:
        ValueError: A tensor has no place, or `mask_hidden` is missing. Others that are missing vLLM leaves as they were
            allocated; here they are a KeyError.
    """

    def __init__(self, folder: str | Path):
        self.said = said = json.loads(Path(folder, "config.json").read_text())
        assert said["model_type"] == "llama" and said["architectures"] == ["LlamaForCausalLMEagle3"]
        assert said["hidden_act"] == "silu"
        table, self.weights = vllm_table(said), {}
        for file in Path(folder).glob("*.safetensors"):  # not those in folders below
            for name, tensor in load_file(file).items():
                name = name.replace("midlayer.", "layers.0.")
                if "t2d" in name:
                    continue
                if name not in table or tuple(tensor.shape) != table[name]:
                    raise ValueError(f"There is no module or parameter named {name!r} of this shape")
                self.weights[name] = tensor.float() if tensor.is_floating_point() else tensor
        if said["parallel_drafting"] and "mask_hidden" not in self.weights:
            raise ValueError("mask_hidden not found in weights")

    def draft(self, tokens, states, table, num_tokens: int) -> torch.Tensor:
        """Scores of the next tokens over the target's vocabulary, `(num_tokens, vocab_size)`, -inf where there is no draft
        token. Without mask slots the best token of each row stands in the next slot.

        Args:
            tokens (`torch.LongTensor` of shape `(n + 1,)`): The text; the target has not read the last token yet.
            states (`tuple[torch.Tensor]`): Of shape `(n, target_hidden_size)`, what enters each of the target's layers.
            table (`torch.Tensor` of shape `(vocab_size, hidden_size)`): The target's embeddings, where the file has none.
        """
        layers = len(states) - 1
        ids = sorted(layer_ids_of(self.said)) or [2, layers // 2, layers - 3]
        hidden, tokens = self.fuse(torch.cat([states[i] for i in ids], dim=-1)), tokens[1:]
        if self.said["parallel_drafting"]:
            names = ("mask_token_id", "pard_token", "ptd_token_id")
            mask = next(self.said[name] for name in names if self.said.get(name) is not None)
            tokens = F.pad(tokens, (0, num_tokens - 1), value=mask)
            fused = self.fuse(self.weights["mask_hidden"].view(1, -1))
            states, _ = self.forward(tokens, torch.cat([hidden, fused.expand(num_tokens - 1, -1)]), table)
            return self.score(states[-num_tokens:])
        rows = []
        for _ in range(num_tokens):
            states, fed = self.forward(tokens, hidden, table)
            rows.append(self.score(states[-1:]))
            tokens, hidden = torch.cat([tokens, rows[-1].argmax(-1)]), torch.cat([hidden, fed[-1:]])
        return torch.cat(rows)

    def norm(self, name: str, states):
        scale = (states.pow(2).mean(-1, keepdim=True) + self.said["rms_norm_eps"]).rsqrt()
        return states * scale * self.weights[f"{name}.weight"]

    def linear(self, name: str, states):
        return F.linear(states, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def fuse(self, features):
        if norm_before_fc_of(self.said):
            features = self.norm("input_norm", features)
        if self.said.get("fc_norm"):
            parts = features.split(self.said.get("target_hidden_size", self.said["hidden_size"]), dim=-1)
            features = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=-1)
        return self.linear("fc", features)

    def forward(self, tokens, hidden, table):
        """Slots in one causal row, their positions counted from 0; returns what is scored, and what the next depth reads."""
        embeds = F.embedding(tokens, self.weights.get("embed_tokens.weight", table))
        for i in range(self.said["num_hidden_layers"]):
            layer = f"layers.{i}."
            normed = self.norm(layer + ("input_layernorm" if i else "hidden_norm"), hidden)
            if i == 0 and self.said.get("norm_before_residual"):
                hidden = normed
            if i == 0:
                normed = torch.cat([self.norm(layer + "input_layernorm", embeds), normed], dim=-1)
            hidden = hidden + self.attend(layer + "self_attn.", normed)
            normed = self.norm(layer + "post_attention_layernorm", hidden)
            gate = F.silu(self.linear(layer + "mlp.gate_proj", normed)) * self.linear(layer + "mlp.up_proj", normed)
            hidden = hidden + self.linear(layer + "mlp.down_proj", gate)
        states = self.norm("norm", hidden)
        return states, states if self.said.get("norm_output") else hidden

    def attend(self, name: str, states):
        d, rope = self.said["head_dim"], self.said["rope_parameters"]
        assert rope["rope_type"] == "default"
        rates = rope["rope_theta"] ** -(torch.arange(0, d, 2) / d)
        angles = torch.outer(torch.arange(len(states)), rates).repeat(1, 2)

        def split(part):
            return self.linear(name + part, states).unflatten(-1, (-1, d)).transpose(0, 1)

        def rotate(heads):
            first, second = heads.chunk(2, dim=-1)
            return heads * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

        queries, keys = rotate(split("q_proj")), rotate(split("k_proj"))
        options = {"is_causal": True, "enable_gqa": True}
        mixed = F.scaled_dot_product_attention(queries[None], keys[None], split("v_proj")[None], **options)[0]
        return self.linear(name + "o_proj", mixed.transpose(0, 1).flatten(1))

    def score(self, states):
        logits = F.linear(states, self.weights["lm_head.weight"])
        logits = logits * self.said.get("logit_scale", 1.0)
        if "d2t" not in self.weights:
            return logits
        scores = logits.new_full((len(states), self.said["vocab_size"]), float("-inf"))
        scores[:, torch.arange(len(self.weights["d2t"])) + self.weights["d2t"]] = logits
        return scores
