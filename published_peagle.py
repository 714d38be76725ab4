"""Checkpoints of EAGLE-3 and P-EAGLE drafters as others publish them, which load into ours: their configurations, and the
names of their tensors.

There are two styles. The plain one is a Llama configuration with further keys, as SafeAILab/EAGLE, SpecForge, SGLang and vLLM
have it; that of `speculators` nests the Llama configuration, and says more of the training.
"""

import re
from collections import Counter

import torch
from safetensors import safe_open


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
    if method not in ("eagle3", "peagle") or fields.pop("use_aux_hidden_state", True) is False:
        raise ValueError(
            f"This drafter is none of EAGLE-3 or P-EAGLE (speculators_model_type {method!r}): it does not read three layers of "
            "the target, which is what can be loaded here."
        )
    if layers != "llama":
        raise ValueError(
            f"The layers of this drafter are of the kind {layers!r}; only those of 'llama' can be loaded."
        )
    if "hidden_size" not in fields:  # the defaults of a Llama model would be billions of random weights
        raise ValueError(
            "The config.json of this drafter does not say its hidden_size, nor in a transformer_layer_config: it is not whole, "
            "so copy or download it again."
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


def check_weights(path: str, prefix: str, draft_ids: torch.LongTensor):
    """Refuse what a file of weights holds beyond the names and shapes of its tensors, and loading would pass over.

    Args:
        path (`str`): A safetensors file.
        prefix (`str`): The one that may stand before all names.
        draft_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`): The target's ids of the draft vocabulary as loaded.

    ValueError: Two tensors have one name of ours, weights are no floating-point numbers, or `d2t` or `t2d` tell another draft
    vocabulary.
    """
    with safe_open(path, "pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}
        maps = {name: file.get_tensor(name).cpu() for name in ("d2t", "t2d") if name in kinds}
    named = {name: name.removeprefix(f"{prefix}.") for name in kinds}
    for theirs, ours in RENAMED.items():
        named = {name: re.sub(theirs, ours, known) for name, known in named.items()}
    counts = Counter(named.values())
    if twice := sorted(name for name, known in named.items() if counts[known] > 1):
        raise ValueError(f"tensors stand there twice, under two names: {', '.join(twice[:8])}")
    weights = {name: kind for name, kind in kinds.items() if name not in maps}
    if odd := [f"{name} ({kind})" for name, kind in weights.items() if kind not in ("F64", "F32", "F16", "BF16")]:
        raise ValueError(f"weights are no floating-point numbers: {', '.join(sorted(odd)[:8])}")
    if (offsets := maps.get("d2t")) is not None:
        if offsets.is_floating_point() or offsets.dtype == torch.bool:
            raise ValueError(f"d2t holds {offsets.dtype}, where it must be whole numbers")
        if not torch.equal(torch.arange(len(offsets)) + offsets, draft_ids):
            raise ValueError(
                "d2t gives other tokens than the draft vocabulary of config.json, which is all of the target's"
            )
    if (known := maps.get("t2d")) is not None and not torch.equal(known.nonzero().flatten(), draft_ids):
        raise ValueError("t2d and d2t tell different draft vocabularies")
