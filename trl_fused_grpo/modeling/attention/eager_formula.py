"""Which formula the attention function of a modeling file computes: found by comparing numbers, not by its name."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .varlen import causal_mask


_HEADS, _KEY_HEADS, _LENGTH, _KEYS, _WIDTH = 4, 2, 5, 7, 8
_SCALING, _SOFTCAP, _WINDOW = 0.4, 1.5, 3
# Options whose meaning is known, and the value that each has in the trial
_KNOWN = {"scaling": _SCALING, "softcap": _SOFTCAP, "sliding_window": _WINDOW, "dropout": 0.0}


class EagerFormula(NamedTuple):
    """Softmax over the scaled scores plus the mask."""

    caps: bool  # whether scores are soft-capped
    has_sinks: bool  # whether each head has a sink


class _Untouched:
    """Stands for an argument that the formula does not know: whoever uses it gets an error."""

    def __bool__(self) -> bool:
        raise TypeError("an argument that no known formula reads")


def eager_formula(original: Callable, module: Any, options: dict[str, Any]) -> EagerFormula | None:
    """
    The formula of a model's own attention function for the keyword arguments of a call, or `None` when it is none that
    is known.
    """
    given = frozenset(name for name, option in options.items() if option is not None)
    if "scaling" not in given:
        return None
    return _compared(original, given, sinks_of(module, options) is not None)


def sinks_of(module: Any, options: dict[str, Any]) -> Tensor | None:
    """The sinks of a layer `[heads]`: given to its attention function, or its own."""
    given = options.get("s_aux")
    return getattr(module, "sinks", None) if given is None else given


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask `[s, k]` as transformers gives it to eager attention `[1, 1, s, k]`: 0 or the lowest number."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)[None, None]


@functools.cache
def _compared(original: Callable, given: frozenset[str], has_sinks: bool) -> EagerFormula | None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).requires_grad_()

    # Not a tensor of the trial is to be saved by the hooks of a checkpointed layer around
    no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.enable_grad(), torch.autocast("cpu", enabled=False), no_hooks:
        tensors = random(1, _HEADS, _LENGTH, _WIDTH), *(random(1, _KEY_HEADS, _KEYS, _WIDTH) for _ in range(2))
        sinks = random(_HEADS)
        weight = random(1, _LENGTH, _HEADS, _WIDTH).detach()
        visible = causal_mask(_LENGTH, _KEYS, _WINDOW, torch.device("cpu"))
        mask = additive_mask(visible, torch.float32)
        module = SimpleNamespace(
            num_key_value_groups=_HEADS // _KEY_HEADS,
            training=False,
            head_dim=_WIDTH,
            sinks=sinks if has_sinks else None,
        )
        known = {**_KNOWN, "s_aux": sinks}
        options = {name: known.get(name, _Untouched()) for name in given}

        def result_of(attention: Callable[[], Tensor]) -> Tensor:
            output = attention()
            grads = torch.autograd.grad((output * weight).sum(), (*tensors, sinks), allow_unused=True)
            grads = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, (*tensors, sinks), strict=True)]
            return torch.cat([t.flatten() for t in (output, *grads)])

        try:
            expected = result_of(lambda: original(module, *tensors, mask, **options)[0])
        except Exception:  # it reads what no known formula reads
            return None
        for formula in (EagerFormula(caps, has) for caps in (False, True) for has in (False, True)):
            found = result_of(functools.partial(_formula, formula, *tensors, sinks, mask))
            if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                is_given = formula.has_sinks <= has_sinks and formula.caps <= ("softcap" in given)
                return formula if is_given else None
    return None


def _formula(formula: EagerFormula, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    """Compute the same as the kernels in torch's simplest operations; returns `[1, s, heads, D]`."""
    key, value = (t.repeat_interleave(_HEADS // _KEY_HEADS, dim=1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * _SCALING  # [1, heads, s, k]
    if formula.caps:
        scores = _SOFTCAP * torch.tanh(scores / _SOFTCAP)
    scores = scores + mask
    if formula.has_sinks:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., : mask.shape[-1]] @ value).transpose(1, 2)
