"""`target.generate(**inputs, custom_generate="<this repo>", assistant_model=drafter, trust_remote_code=True)`."""


def generate(model, assistant_model=None, revision=None, **kwargs):
    """Decode with a P-EAGLE drafter without attaching it first. Takes what `model.generate` takes; `revision` says where this
    file comes from, and to transformers alone."""
    if assistant_model is None:
        raise ValueError(
            "Pass the drafter: assistant_model=AutoModel.from_pretrained(<this repo>, trust_remote_code=True)"
        )
    return assistant_model.speculative_generate(model, **kwargs)
