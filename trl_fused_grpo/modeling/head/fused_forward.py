"""`model(..., fused=request)`: log-probabilities instead of logits, through every wrapper around the model."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._utils import temporary_attr
from trl_fused_grpo.modeling.attention.packed import text_model_alone
from trl_fused_grpo.modeling.attention.watch import PACKED_ARGUMENTS
from trl_fused_grpo.modeling.layers.compiled import compiled_layers
from trl_fused_grpo.modeling.layers.forward_override import override_forward
from trl_fused_grpo.modeling.layers.unpacked import unpacking
from trl_fused_grpo.ops.chunk_size import default_group_mib
from trl_fused_grpo.ops.forecast import Forecast
from trl_fused_grpo.ops.linear_logps import FusedStats, fused_linear_logps
from trl_fused_grpo.ops.lm_head import LMHead

from .moe import load_balancing_loss
from .output_projection import LogitScaling, head_parameter_modules, read_lm_head


def run_backbone(causal_lm: PreTrainedModel, model_inputs: dict[str, Any], compiled: Sequence[tuple[int, Any]]) -> Any:
    """The outputs of a causal model's backbone, `last_hidden_state` `[B, L, H]` among them."""
    backbone = architecture.backbone(causal_lm)
    # PEFT passes the arguments it knows on, set or not; not every backbone knows them
    given = {name: value for name, value in model_inputs.items() if value is not None}
    if not architecture.takes_position_ids(causal_lm):
        given.pop("position_ids", None)
    if architecture.knows_caches(causal_lm):
        given["use_cache"] = False
    call = given.get("watched")
    # All of its layers that need to know of packed rows run unpacked then
    if not architecture.takes_any_argument(causal_lm):
        given = {name: value for name, value in given.items() if name not in PACKED_ARGUMENTS}
    with compiled_layers(causal_lm, compiled, call), unpacking(causal_lm, call), text_model_alone(causal_lm):
        return backbone(**given)


class FusedRequest:
    """
    What a forward should return in place of logits. The model gets it as one opaque callable: mixed-precision wrappers
    cast the tensors they find in keyword arguments.
    """

    def __init__(
        self,
        positions: Tensor,  # Flat positions in `[B, T]` of the tokens whose log-prob is asked for, `[N]`
        completion_ids: Tensor,  # Token ids `[B, T]`; each is predicted from the position before it
        temperature: float,  # Sampling temperature
        scaling: LogitScaling | None = None,  # Of the logits. By default what the model's configuration says now
        forecast: Forecast | None = None,  # The gradient each of the `N` rows is expected to receive
        # Flat positions, in the hidden states, of the tokens before, `[N]`; `None` where these end with the completion
        logit_positions: Tensor | None = None,
        fp32: bool = False,  # Whether the head computes in float32 outside autocast
        aux_loss: bool = False,  # Whether to return the load-balancing loss of a Mixture-of-Experts model too
        compiled: Sequence[tuple[int, Any]] = (),  # The layers that run compiled, each with its number in the model
        logits_mib: float | None = None,
        tokens: int = 0,  # Tokens in the model at a time: those of TRL's rows, with padding, or of this row if more
        **options: Any,  # of [`fused_linear_logps`]
    ):
        self.positions, self.completion_ids, self.logit_positions = positions, completion_ids, logit_positions
        self.temperature, self.scaling, self.forecast = temperature, scaling, forecast
        self.fp32, self.aux_loss, self.compiled = fp32, aux_loss, compiled
        self.logits_mib, self.tokens, self.options = logits_mib, tokens, options
        self.stats = FusedStats()

    def __call__(self, causal_lm: PreTrainedModel, **model_inputs: Any) -> tuple[Tensor, ...]:
        """Run backbone and head; return log-probabilities `[N]`, entropies `[N]` and, if asked, the aux loss."""
        asks_for_routers = self.aux_loss or getattr(causal_lm.config.get_text_config(), "output_router_logits", False)
        if asks_for_routers:
            model_inputs["output_router_logits"] = True
        outputs = run_backbone(causal_lm, model_inputs, self.compiled)
        torch.clear_autocast_cache()  # copies of all weights, which the head has no use for
        logps, entropies = self._run_head(causal_lm, outputs.last_hidden_state)
        results = (logps,) if entropies is None else (logps, entropies)
        if self.aux_loss:
            results += (load_balancing_loss(causal_lm, outputs, model_inputs.get("attention_mask")),)
        return tuple(as_complex(result) for result in results)

    def _run_head(self, causal_lm: PreTrainedModel, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Log-probs `[N]` and entropies `[N]` from hidden states `[B, L, H]`, through the head and its wrappers."""
        hidden_rows, targets = self._rows_and_targets(hidden)

        def head_forward(hidden_rows: Tensor) -> tuple[Tensor, Tensor | None]:
            logps, entropies = self._logps(read_lm_head(causal_lm, self.fp32, self.scaling), hidden_rows, targets)
            return as_complex(logps), None if entropies is None else as_complex(entropies)

        # Through the modules' own calls, so that ZeRO-3 and FSDP gather their weights, in backward too
        call: Callable = head_forward
        for module in reversed(head_parameter_modules(causal_lm)):
            call = partial(call_with_forward, module, call)
        logps, entropies = call(hidden_rows)
        return logps.real, None if entropies is None else entropies.real

    def _rows_and_targets(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states `[N, H]` that predict the tokens asked for, and those tokens' ids `[N]`."""
        index = self.logit_positions
        if index is None:
            width = self.completion_ids.shape[1]
            row, column = self.positions // width, self.positions % width
            index = (row + 1) * hidden.shape[1] - width - 1 + column  # [N]
        hidden_rows = hidden.flatten(0, 1).index_select(0, index.to(hidden.device))  # [N, H]
        return hidden_rows, self.completion_ids.flatten().index_select(0, self.positions)

    def _logps(self, head: LMHead, hidden_rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies `[N]` on the device of `targets`; with `device_map` the head can be on another."""
        device = head.weight.device
        forecast = self.forecast if device == targets.device else None  # whose tensors are on that of the targets
        group_mib = default_group_mib(hidden_rows.shape[1], self.tokens) if self.logits_mib is None else None
        logps, entropies = fused_linear_logps(
            hidden_rows.to(device),
            head,
            targets.to(device),
            self.temperature,
            forecast=forecast,
            logits_mib=self.logits_mib,
            group_mib=group_mib,
            stats=self.stats,
            **self.options,
        )
        return logps.to(targets.device), None if entropies is None else entropies.to(targets.device)


def as_complex(result: Tensor) -> Tensor:
    """
    A result as the real part of a complex tensor. Mixed-precision wrappers round the floating-point outputs of a module
    (Accelerate has FSDP2 round them to bfloat16, which leaves a log-probability two decimals), but no complex ones.
    """
    result = result.to(torch.promote_types(result.dtype, torch.float32))  # there are no complex bfloat16 tensors
    return torch.complex(result, torch.zeros_like(result))


def call_with_forward(module: nn.Module, forward: Callable, *args: Any) -> Any:
    """Call a module, hooks and all, with another forward. Other threads find its own."""
    # FSDP1 is a module around the module, which gathers weights in its own forward
    inner, thread = torch_compat.without_fsdp1(module), get_ident()
    own = inner.forward

    def forward_of_this_thread(*args: Any, **kwargs: Any) -> Any:
        return (forward if get_ident() == thread else own)(*args, **kwargs)

    with temporary_attr(inner, "forward", forward_of_this_thread):
        return module(*args)


def install_fused_forward(causal_lm: PreTrainedModel) -> None:
    """Let a causal model's forward take the keyword `fused`. Without it the forward is what it was. Idempotent."""
    override_forward(causal_lm, _answer_request)


def _answer_request(
    causal_lm: PreTrainedModel, original: Callable, *args: Any, fused: Callable | None = None, **kwargs: Any
) -> Any:
    return original(*args, **kwargs) if fused is None else fused(causal_lm, *args, **kwargs)
