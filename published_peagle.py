"""Checkpoints of EAGLE-3 and P-EAGLE drafters as others publish them, which load into ours: their configurations, and the
names of their tensors.

There are two styles. The plain one is a Llama configuration with further keys, as SafeAILab/EAGLE, SpecForge, SGLang and vLLM
have it; that of `speculators` nests the Llama configuration, and says more of the training.
"""

# From names of theirs, regular expressions, to ours.
RENAMED = {r"^midlayer\.": "layers.0."}
# What is not read: the inverse of d2t, d2t itself where it changes nothing, and the target's own parts.
UNREAD = {"t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight"}
# Where the reserved token of mask slots is named; the first one counts, as in vLLM.
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


def is_published(config: dict) -> bool:
    """Whether a `config.json` is of an EAGLE-3 or P-EAGLE drafter without our code."""
    ours = "AutoModel" in (config.get("auto_map") or {})
    named = any("eagle" in name.lower() for name in config.get("architectures") or [])
    # SafeAILab's call themselves Llama models; no such model has a draft vocabulary.
    return not ours and (named or "draft_vocab_size" in config)


def published_fields(config: dict) -> dict:
    """What a `config.json` says in the fields of [`PEagleConfig`]; ours stays as it is.

    ValueError: It is of another method, or its layers are of another kind.
    """
    if "own_embeddings" in config:
        return config
    said = {name: value for name, value in config.items() if value is not None}
    fields = said.pop("transformer_layer_config", {}) | said.pop("eagle_config", {}) | said
    method, layers = fields.pop("speculators_model_type", "eagle3"), fields.get("model_type", "llama")
    if method not in ("eagle3", "peagle") or not fields.pop("use_aux_hidden_state", True):
        raise ValueError(
            f"This drafter is none of EAGLE-3 or P-EAGLE (speculators_model_type {method!r}): it does not read three layers of "
            "the target, which is what can be loaded here."
        )
    if layers != "llama":
        raise ValueError(
            f"The layers of this drafter are of the kind {layers!r}; only those of 'llama' can be loaded."
        )
    training = fields.pop("speculators_config", {})
    for proposal in (training.get("proposal_methods") or [])[:1]:
        if tokens := proposal.get("speculative_tokens"):
            fields["num_depths"] = fields["speculation_depth"] = tokens
    if name := (training.get("verifier") or {}).get("name_or_path"):
        fields["target_name_or_path"] = name
    if not fields.get("eagle_aux_hidden_state_layer_ids"):  # an empty list stands for the default
        fields.pop("eagle_aux_hidden_state_layer_ids", None)
    masks = [fields.pop(name) for name in MASK_TOKENS if name in fields]
    known = {"mask_token_id": masks[0] if masks else None, "own_embeddings": None}
    fields.pop("auto_map", None)  # to code of theirs
    return {"fc_norm": False} | fields | known
