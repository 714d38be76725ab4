"""Chat templates, tokenizers and chats that the data tests share.

The tokenizers are built here (bytes and a few merges), so nothing is downloaded.
"""

import json

import pytest
from conftest import SHARED
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data.chat_template import encode_conversation, show_supervision
from data.conversations import BadConversation


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content + '<|im_end|>' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same text with the markers that transformers wants for its own assistant mask: an independent oracle.
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set lead = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set lead = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (lead if loop.first else '') }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# As Phi-3: every rendering without a generation prompt ends with one more EOS.
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# No end token, and the generation prompt ends in a space that may merge with the answer.
PLAIN = (
    "{% for m in messages %}{{ ('Bot: ' if m.role == 'assistant' else 'You: ') + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Bot: ' }}{% endif %}"
)
# Hermes style: tools and calls as JSON.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = [("Ġ", "H"), ("ĠH", "i"), ("H", "i"), ("Ġ", "Ġ"), (".", "Ċ"), ("t", "h"), ("ðŁ", "ĺ"), ("ð", "Ł")]


def make_tokenizer(template, specials, *, eos, bos=None, merges=(), trim_offsets=True, adds_bos=False):
    """A byte-level one with the given merges and special tokens; ``adds_bos``: outside a template, as Llama-3's."""
    vocab = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab += [left + right for left, right in merges if left + right not in vocab]
    model = models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=list(merges))
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(list(specials))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if adds_bos:
        ids = [(bos, tokenizer.token_to_id(bos))]
        steps.append(processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=ids))
    tokenizer.post_processor = processors.Sequence(steps)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos, name_or_path="tiny")
    wrapped.chat_template = template
    return wrapped


def chatml(template=CHATML, **options):
    return make_tokenizer(template, ["<|im_start|>", "<|im_end|>"], eos="<|im_end|>", **options)


def gemma():
    specials = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    return make_tokenizer(GEMMA, specials, eos="<eos>", bos="<bos>", adds_bos=True)


def llama3():
    specials = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return make_tokenizer(LLAMA3, specials, eos="<|eot_id|>", bos="<|begin_of_text|>", adds_bos=True)


def phi3():
    specials = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    return make_tokenizer(PHI3, specials, eos="<|endoftext|>")


FAMILIES = {  # tokenizer, the text of the token that ends a turn
    "chatml": (chatml, "<|im_end|>"),
    "gemma": (gemma, "<end_of_turn>"),
    "llama3": (llama3, "<|eot_id|>"),
    "phi3": (phi3, "<|end|>"),
}


def chat(*contents, system=None):
    """Messages of a chat: user, assistant, user, ..."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def supervised_runs(encoded, tokenizer):
    """Decoded text of each supervised run."""
    shown = show_supervision(encoded["input_ids"], encoded["loss_mask"], tokenizer)
    return [part.split("⟧")[0] for part in shown.split("⟦")[1:]]


def template_ids(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def samples_of(row, tokenizer, stop_token_ids=()):
    return encode_conversation(row, tokenizer, stop_token_ids)[0]


def encode(row, tokenizer, stop_token_ids=()):
    """The only sample of a row, as a dict."""
    (sample,) = samples_of(row, tokenizer, stop_token_ids)
    return {"input_ids": sample.input_ids, "loss_mask": sample.loss_mask}


def reason_of(row, tokenizer, **options):
    with pytest.raises(BadConversation) as caught:
        encode_conversation(row, tokenizer, **options)
    return caught.value.reason


def write(folder, rows, name="chats.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def shared(name):
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"{path} is missing")
    return path


HELLO = {"role": "user", "content": "Hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "get_tide", "arguments": {"hour": None, "at": "Oban"}}}
TOOL = {"type": "function", "function": {"name": "get_tide", "description": "Tide", "parameters": {"type": "object"}}}
