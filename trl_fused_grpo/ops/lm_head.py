"""The linear head of a language model and what follows it before the softmax, as plain tensors."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """
    A low-rank term beside a head's weight, as LoRA trains it: `W + scale * b @ a`, which nobody ever builds.

    Args:
        a (`Tensor`):
            Shape `[r, H]`.
        b (`Tensor`):
            Shape `[V, r]`.
        scale (`float`, *optional*, defaults to `1.0`):
            Multiplier of the term.
        dropout (`float`, *optional*, defaults to `0.0`):
            Probability with which an element of the hidden states is dropped on its way into `a`.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    dropout: float = 0.0

    def down(self, hidden: Tensor) -> Tensor:
        """What `b` is applied to `[N, r]`, from hidden states `[N, H]`."""
        hidden = F.dropout(hidden, self.dropout).to(self.a.dtype)
        return self.scale * F.linear(hidden, self.a)  # [N, H] @ [H, r]


@dataclass(frozen=True)
class LMHead:
    """
    A linear head and what the model does to its output before the softmax.

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
            Whether the projection stays in the weight's dtype under autocast (`cast_lm_head_to_fp32`).
        low_rank (`tuple[LowRank, ...]`, *optional*):
            Low-rank terms beside the weight.
    """

    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    fp32: bool = False
    low_rank: tuple[LowRank, ...] = ()

    def operands(self, hidden: Tensor, temperature: float | Tensor) -> "Operands":
        """
        Spell out `(hidden @ (weight + low_rank)^T + bias) / temperature` with one temperature for all rows.

        Args:
            hidden (`Tensor`): shape `[N, H]`.
            temperature (`float` or `Tensor`): one for all rows, or one for each, shape `[N]`.

        Raises:
            `ValueError`: for temperatures by row under a softcap, which comes before them.
        """
        columns = [hidden, *(term.down(hidden).to(hidden.dtype) for term in self.low_rank)]
        lora_b, bias = [term.b for term in self.low_rank], self.bias
        if isinstance(temperature, Tensor):
            if self.softcap is not None:
                raise ValueError("a temperature for each row does not go with a softcap of the logits")
            if bias is not None:
                columns, lora_b, bias = [*columns, torch.ones_like(hidden[:, :1])], [*lora_b, bias.unsqueeze(1)], None
            columns = [(column / temperature.unsqueeze(1)).to(hidden.dtype) for column in columns]
            temperature = 1.0
        return Operands(
            columns[0] if len(columns) == 1 else torch.cat(columns, dim=1),
            (lora_b[0] if len(lora_b) == 1 else torch.cat(lora_b, dim=1)) if lora_b else None,
            bias,
            temperature,
        )


class Operands(NamedTuple):
    """Logits are `(hidden @ [weight, lora_b]^T + bias) / temperature`, before scale and softcap."""

    hidden: Tensor  # [N, H + r]
    lora_b: Tensor | None  # [V, r]
    bias: Tensor | None  # [V]
    temperature: float
