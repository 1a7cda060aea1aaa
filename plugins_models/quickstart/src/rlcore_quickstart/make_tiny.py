"""Makes the tiny model that ships with this package: ``python -m rlcore_quickstart.make_tiny DIR``.

A 0.8 M byte-level Llama learns to copy words (rows that repeat themselves), then to solve the bundled tasks (made-up words,
so every pool of names is unseen), and at last, from spoiled answers, to be noisy: it knows the tasks, and at temperature
1 it solves about one in five. That is what reinforcement learning then sharpens. One core, about ten minutes.
"""

from __future__ import annotations

import json
import random
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rlcore_tbench2.bundled.kinds import KINDS, Instance, Words

from rlcore_quickstart.kinds import TINY_KINDS

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

__all__ = ["CONFIG", "answer_row", "make", "random_model", "tokenizer_json", "write_model"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""A byte is its own token id; these follow, from 256."""
PAD, START, END = 256, 257, 258

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": PAD,
    "dtype": "float32",
    "eos_token_id": END,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.08,  # heads that copy form only from weights that are not tiny
    "intermediate_size": 352,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "vocab_size": 259,
}

ROWS = 16
"""Rows of a batch."""
COPY_STEPS, TASK_STEPS, NOISY_STEPS = 500, 2000, 250
LEARNING_RATE = 2e-3
SPOILED = 0.5
"""Share of answers that are spoiled in the noisy steps."""

Row: TypeAlias = tuple[list[int], list[bool]]
"""Token ids, and which of them are learned."""


# --- the files --------------------------------------------------------------------------------------------------------


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte, in the order of the bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(256 + index) for index, byte in enumerate(shifted)}
    return [characters.get(byte, chr(byte)) for byte in range(256)]


def tokenizer_json() -> str:
    """A ``tokenizer.json`` without merges: one token per byte, and ChatML's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return str(tokenizer.to_str(pretty=False))


def write_model(directory: Path, model: LlamaForCausalLM) -> None:
    """Write the checkpoint; weights are stored as bfloat16, half the size, and computed with in float32."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    del weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (directory / "tokenizer.json").write_text(tokenizer_json())
    tokenizer_config = {
        "bos_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    for file in directory.iterdir():
        file.chmod(0o644)


# --- what it learns from ----------------------------------------------------------------------------------------------


def _copy_row(rng: random.Random) -> Row:
    """The same short text again and again; everything but the first time is learned."""
    length = rng.randint(8, 20)
    text = rng.choices(f"{string.ascii_lowercase} .".encode(), k=length)
    times = 96 // length
    return text * times, [False] * length + [True] * (length * (times - 1))


def _task_row(rng: random.Random, spoiled: float) -> Row:
    """A task in the words of a new pool, with its answers; each is spoiled with the given probability."""
    pool = {"".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))) for _ in range(16)}
    instance = KINDS[rng.choice(TINY_KINDS)].make(Words(rng, sorted(pool)))
    return answer_row(instance, lambda command: _spoil(rng, instance, command) if rng.random() < spoiled else command)


def answer_row(instance: Instance, answer: Callable[[str], str] = str) -> Row:
    """The conversation in which a task is solved by ``answer`` of its right commands; the answers are learned."""
    ids: list[int] = []
    learned: list[bool] = []

    def add(piece: list[int], learn: bool) -> None:
        ids.extend(piece)
        learned.extend([learn] * len(piece))

    said = instance.instruction
    for command, output in instance.steps:
        add([START, *b"user\n", *said.encode(), END, *b"\n", START, *b"assistant\n"], False)
        add([*answer(command).encode(), END], True)
        add([*b"\n"], False)
        said = output
    return ids, learned


def _spoil(rng: random.Random, instance: Instance, command: str) -> str:
    """A wrong command: the plausible one of the task, or the right one with typing errors."""
    if rng.random() < 0.3:
        return instance.wrong
    letters = list(command)
    for _ in range(rng.randint(1, 2)):
        letters[rng.randrange(len(letters))] = rng.choice(string.ascii_lowercase)
    if rng.random() < 0.3:
        del letters[rng.randint(1, len(letters)) :]
    return "".join(letters)


# --- learning ---------------------------------------------------------------------------------------------------------


def random_model(seed: int) -> LlamaForCausalLM:
    """The model with fresh weights, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def _batches(rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``[ROWS, T]`` ids and labels of every step (−100: not learned)."""
    import torch

    for step in range(COPY_STEPS + TASK_STEPS + NOISY_STEPS):
        if step < COPY_STEPS:
            rows = [_copy_row(rng) for _ in range(ROWS)]
        else:
            spoiled = SPOILED if step >= COPY_STEPS + TASK_STEPS else 0.0
            rows = [_task_row(rng, spoiled) for _ in range(ROWS)]
        ids = torch.full((ROWS, max(len(row) for row, _ in rows)), PAD)
        labels = torch.full_like(ids, -100)
        for number, (row, learned) in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            labels[number, : len(row)] = torch.where(torch.tensor(learned), torch.tensor(row), -100)
        yield ids, labels


def make(seed: int = 0) -> Iterator[tuple[int, float, LlamaForCausalLM]]:
    """Learn, giving the step, its loss and the model after every step."""
    import torch

    model = random_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    steps = COPY_STEPS + TASK_STEPS + NOISY_STEPS
    for step, (ids, labels) in enumerate(_batches(random.Random(seed))):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / steps)
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step + 1, loss.item(), model


def main() -> None:
    """Make the model and write it into the folder that the command line names."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m rlcore_quickstart.make_tiny DIR")
    for step, loss, model in make():  # noqa: B007 - the last one is written
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    write_model(Path(sys.argv[1]), model)


if __name__ == "__main__":
    main()
