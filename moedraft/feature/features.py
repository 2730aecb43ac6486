"""What a target computes on its way, caught by hooks: works for any decoder-only model of transformers.

Layer id i stands for the states that enter decoder layer i; the number of layers for those that leave the
last one, before the final norm.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from moedraft.core import InvalidRequest, UnsupportedModel


class FeatureCapture:
    """While entered, keeps the states at `layer_ids` of the model's latest forward.

    Raises InvalidRequest for ids that the model does not have, UnsupportedModel where no list of decoder
    layers is found in it.
    """

    def __init__(self, hf: Any, layer_ids: tuple[int, ...]) -> None:
        self.layers = decoder_layers(hf)
        wrong = [i for i in layer_ids if not 0 <= i <= len(self.layers)]
        if wrong:
            raise InvalidRequest(f"the target has states 0 to {len(self.layers)}, none of number {wrong[0]}.")
        self.layer_ids = layer_ids
        self.found: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> FeatureCapture:
        for i in self.layer_ids:
            self._handles.append(self._watch(i))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, i: int) -> Any:
        if i == len(self.layers):

            def after(module: nn.Module, inputs: Any, output: Any) -> None:
                self.found[i] = output[0] if isinstance(output, tuple) else output

            return self.layers[-1].register_forward_hook(after)

        def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.found[i] = inputs[0] if inputs else named["hidden_states"]

        return self.layers[i].register_forward_pre_hook(before, with_kwargs=True)

    def joined(self) -> torch.Tensor:
        """The states of the latest forward, in the order of `layer_ids`: [B, T, their number · H]."""
        return torch.cat([self.found[i] for i in self.layer_ids], dim=-1)


def decoder_layers(hf: Any) -> nn.ModuleList:
    """The model's list of decoder layers, wherever its architecture keeps it."""
    count = hf.config.get_text_config().num_hidden_layers
    found = [m for m in hf.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise UnsupportedModel(
            f"{hf.config.model_type}: {len(found)} lists of {count} layers were found where one was "
            "expected, so that its states cannot be read."
        )
    return found[0]


class Teacher:
    """A target as a drafter learns from it: its features, and its logits over the draft vocabulary."""

    def __init__(self, hf: Any, layer_ids: tuple[int, ...], vocabulary: torch.Tensor) -> None:
        self.hf, self.layer_ids = hf, layer_ids
        head = hf.get_output_embeddings()
        self.rows: torch.Tensor = head.weight.detach()[vocabulary]
        bias = getattr(head, "bias", None)
        self.bias: torch.Tensor | None = None if bias is None else bias.detach()[vocabulary]
        self._check(vocabulary)

    @torch.no_grad()
    def _check(self, vocabulary: torch.Tensor) -> None:
        """Take over a factor on all logits; refuse whatever else changes them behind the output matrix."""
        ids = torch.arange(min(8, self.hf.get_input_embeddings().num_embeddings))[None].to(self.hf.device)
        true = self.hf(input_ids=ids, use_cache=False).logits[..., vocabulary].float()
        ours = self.logits(self.read(ids)[1]).float()
        limit = 0.05 * true.std().clamp_min(1e-6)
        if not (true - ours).abs().max() <= limit:  # Granite and Cohere scale theirs
            factor = (true * ours).sum() / ours.square().sum()
            if not (true - factor * ours).abs().max() <= limit:
                raise UnsupportedModel(
                    f"{self.hf.config.model_type}: no drafter can be trained for this target, because it "
                    "changes its logits after the output matrix."
                )
            self.rows = self.rows * factor.to(self.rows)
            self.bias = None if self.bias is None else self.bias * factor.to(self.bias)

    @torch.no_grad()
    def read(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [B, T], padded on the right → features [B, T, n·H], and the last normed states [B, T, H]."""
        with FeatureCapture(self.hf, self.layer_ids) as capture:
            last: torch.Tensor = self.hf.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        return capture.joined(), last

    @torch.no_grad()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Last normed states [..., H] → logits over the draft vocabulary."""
        return linear(states.to(self.rows.dtype), self.rows, self.bias)
