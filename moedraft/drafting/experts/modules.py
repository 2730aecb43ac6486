"""Which layers of a draft base an adapter may cover."""

from __future__ import annotations

import re
from typing import Any, Protocol

import torch
from torch import nn

from moedraft.core import UnsupportedModel

# Names of layers that compute keys or values, alone or together with queries. Tail experts leave them alone.
MAKES_KV = re.compile(r"(^|_)(k|v|kv|qkv)(_|$)|key|value|c_attn|Wqkv|kv_[ab]_proj|W[kv]$")


class AdaptableBase(Protocol):
    """A draft base that experts can be put on; `LanguageModel` and `FeatureBase` are some."""

    hf: Any  # the module whose linear layers are adapted
    name: str
    num_layers: int
    num_parameters: int
    cpu_fast_paths: bool

    @property
    def device(self) -> torch.device: ...
    def weights_hash(self) -> str: ...


def adaptable(draft: AdaptableBase, scope: str) -> list[str]:
    """Names of the linear layers that an adapter of this scope covers; the output layer is the last.

    "full": every one. "tail": those after which no key or value is computed, so that the draft's cache is
    the same whichever expert drafts. In a mixture of experts both leave out the routers and the layers that
    these send tokens to: their rows are reordered, so it is not known which sequence a row belongs to. Raises
    UnsupportedModel where the architecture has no such layers.
    """
    names = []
    for prefix, layer in _decoder_layers(draft):
        routed = tuple(f"{name}." for name, module in layer.named_modules() if _routes(name, module))
        names += [
            f"{prefix}.{name}"
            for name, module in layer.named_modules()
            if is_linear(module)
            and not name.startswith(routed)
            and name.rpartition(".")[2] not in ("gate", "router")
        ]
    head = draft.hf.get_output_embeddings()
    output = [name for name, module in draft.hf.named_modules() if module is head and is_linear(module)]
    if not names or not output:
        raise UnsupportedModel(f"{draft.name}: no linear layers found that a draft expert could adapt.")
    names.append(output[0])
    return names if scope == "full" else [n for n in names if keeps_cache(n, draft.num_layers)]


def keeps_cache(name: str, num_layers: int) -> bool:
    """Whether adapting this module leaves every key and value of the draft as it is."""
    layer = re.search(r"\.(\d+)\.", name)
    last = layer is None or int(layer[1]) == num_layers - 1
    return last and not MAKES_KV.search(name.rpartition(".")[2])


def _decoder_layers(draft: AdaptableBase) -> list[tuple[str, nn.Module]]:
    for name, module in draft.hf.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == draft.num_layers:
            return [(f"{name}.{i}", layer) for i, layer in enumerate(module)]
    raise UnsupportedModel(f"{draft.name}: its decoder layers were not found.")


def _routes(name: str, module: nn.Module) -> bool:
    """Whether this part of a decoder layer sends each token to some of the modules inside it only."""
    return isinstance(module, nn.ModuleList) or name.rpartition(".")[2] in ("experts", "router")


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
