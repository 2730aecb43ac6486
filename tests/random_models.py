"""Small transformers models with random weights whose logits are far enough apart for exact comparisons."""

from __future__ import annotations

import random

import torch
import transformers

from moedraft import cpu
from moedraft.cpu.lean import LeanForward, fits
from moedraft.models import LanguageModel

VOCAB = 97
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS = {
    "llama": transformers.LlamaConfig(**COMMON, intermediate_size=64, num_key_value_heads=2),
    "qwen2": transformers.Qwen2Config(**COMMON, intermediate_size=64, num_key_value_heads=2),
    "qwen3": transformers.Qwen3Config(**COMMON, intermediate_size=64, num_key_value_heads=2, head_dim=8),
    "gpt_neox": transformers.GPTNeoXConfig(**COMMON, intermediate_size=64),
    "gpt2": transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=256),
}


def random_model(
    kind: str, seed: int, layers: int = 3, vocab: int = VOCAB, *, cpu_fast_paths: bool = True
) -> LanguageModel:
    torch.manual_seed(seed)
    changes = {"num_hidden_layers": layers, "layer_types": None, "vocab_size": vocab}
    config = CONFIGS[kind].__class__.from_dict(CONFIGS[kind].to_dict() | changes)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():  # the usual 0.02 would make every logit a near-tie
        if parameter.ndim == 2:
            parameter.normal_(std=0.15)
    made = LanguageModel(model, None, kind, cpu_fast_paths)
    made.lean = LeanForward(model, fuse=False) if cpu.allows(made) and fits(model) else None
    return made


def prompts_of(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]
