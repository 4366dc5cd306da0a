"""The linear head of a language model, and what the model does to the logits before the softmax, as plain tensors."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """
    A low-rank term beside a head's weight, as LoRA trains it: `W + scale * b @ a`. The sum is never materialised.

    Args:
        a (`Tensor`):
            Shape `[r, H]`.
        b (`Tensor`):
            Shape `[V, r]`.
        scale (`float`, *optional*, defaults to `1.0`):
            Multiplier of the term.
        dropout (`float`, *optional*, defaults to `0.0`):
            Probability with which an element of the hidden states is dropped before `a` is applied.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    dropout: float = 0.0

    def apply_a(self, hidden: Tensor) -> Tensor:
        """The input of `b` `[N, r]`, from hidden states `[N, H]`: dropout, then `a`, then the scale."""
        hidden = F.dropout(hidden, self.dropout).to(self.a.dtype)
        return self.scale * F.linear(hidden, self.a)  # [N, H] @ [H, r]


@dataclass(frozen=True)
class LMHead:
    """
    A linear head, and what the model does to the logits before the softmax.

    Args:
        weight (`Tensor`):
            Shape `[V, H]`.
        bias (`Tensor`, *optional*):
            Shape `[V]`.
        logit_scale (`float`, *optional*, defaults to `1.0`):
            Multiplier of the logits (Cohere, Falcon-H1; Granite divides, so its scale is the inverse).
        softcap (`float`, *optional*):
            `softcap * tanh(logits / softcap)`, after the scale (Gemma 2, RecurrentGemma, xLSTM).
        fp32 (`bool`, *optional*, defaults to `False`):
            Whether the logits are computed in the weight's dtype under autocast too (TRL's `cast_lm_head_to_fp32`).
        low_rank (`tuple[LowRank, ...]`, *optional*):
            Low-rank terms beside the weight.
    """

    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    fp32: bool = False
    low_rank: tuple[LowRank, ...] = ()

    def linear_inputs(self, hidden: Tensor, temperature: float | Tensor) -> "LinearInputs":
        """
        Write `(hidden @ (weight + low_rank)^T + bias) / temperature` as one linear function with one temperature.

        Low-rank terms become further columns: of the hidden states (`a` applied) and of the weight (`b`). Temperatures
        by row divide the hidden states, and the bias then becomes a column too.

        Args:
            hidden (`Tensor`): shape `[N, H]`.
            temperature (`float` or `Tensor`): one for all rows, or one for each row, shape `[N]`.

        Raises:
            `ValueError`: for temperatures by row with a softcap, which the model applies before the temperature.
        """
        columns = [hidden, *(term.apply_a(hidden).to(hidden.dtype) for term in self.low_rank)]
        lora_b, bias = [term.b for term in self.low_rank], self.bias
        if isinstance(temperature, Tensor):
            if self.softcap is not None:
                raise ValueError(
                    "a temperature for each row does not go with a softcap of the logits; pass one number for all rows"
                )
            if bias is not None:
                columns, lora_b, bias = [*columns, torch.ones_like(hidden[:, :1])], [*lora_b, bias.unsqueeze(1)], None
            columns = [(column / temperature.unsqueeze(1)).to(hidden.dtype) for column in columns]
            temperature = 1.0
        return LinearInputs(
            columns[0] if len(columns) == 1 else torch.cat(columns, dim=1),
            (lora_b[0] if len(lora_b) == 1 else torch.cat(lora_b, dim=1)) if lora_b else None,
            bias,
            temperature,
        )


class LinearInputs(NamedTuple):
    """Raw logits are `hidden @ [weight, lora_b]^T + bias`; the temperature divides them after scale and softcap."""

    hidden: Tensor  # [N, H + r]
    lora_b: Tensor | None  # [V, r]
    bias: Tensor | None  # [V]
    temperature: float
