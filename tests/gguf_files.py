"""Writes tiny models with random weights as GGUF files, as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def letters() -> list[str]:
    """The 256 bytes as byte-level BPE spells them."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelt = {byte: chr(byte) for byte in printed}
    others = [byte for byte in range(256) if byte not in spelt]
    return [*spelt.values(), *(chr(256 + at) for at in range(len(others)))]


def tiny_llama(seed: int = 0) -> transformers.LlamaForCausalLM:
    model: transformers.LlamaForCausalLM = tiny_model(transformers.LlamaConfig, seed)
    return model


def tiny_model(kind: Any, seed: int = 0, **more: Any) -> Any:
    """kind: of configuration; more: what it has beside Llama's."""
    torch.manual_seed(seed)
    config = kind(
        vocab_size=len(SPECIAL) + 256 + 2,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        **more,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=0.15)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp turns neighbouring numbers, transformers those half a head apart."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, arch: str = "llama") -> Path:
    """`model` in float32, with a tokenizer of single bytes and a chat template."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*SPECIAL, *letters(), "he", "hel"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * 258)
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, value in model.state_dict().items():
        if (spelt := gguf_name(name)) is None:
            continue
        data = value.numpy()
        for part, heads in (("attn_q.", config.num_attention_heads), ("attn_k.", config.num_key_value_heads)):
            data = interleaved(data, heads) if part in spelt and arch == "llama" else data
        writer.add_tensor(spelt, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str | None:
    """None: it is another tensor under a second name."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return whole.get(name)
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[module]}.{kind}"
