"""In which precision a layout is tried, and what rounding makes there."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat import models as models_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo.modeling.fused_forward import CuSeqlensIgnoredError

from .logps import PromptsNotSharedError, RowsRefusedError
from .logps_request import LogpsArgs, LogpsOptions


logger = logging.get_logger(__name__)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def rounding_of(call: LogpsArgs, options: LogpsOptions) -> float:
    """The rounding error of the precision that trains. On CUDA float32 may be TF32, by default in convolutions."""
    device_type = call.input_ids.device.type
    is_cast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_cast else options.causal_lm.dtype
    # Engines of several processes may cast weights by themselves
    may_round = device_type == "cuda" and (options.processes > 1 or _rounds_to_tf32(options.causal_lm))
    return 2**-10 if may_round and dtype == torch.float32 else torch.finfo(dtype).eps


def _rounds_to_tf32(causal_lm: nn.Module) -> bool:
    if torch_compat.matmuls_are_tf32():
        return True
    return torch_compat.convolutions_are_tf32() and any(isinstance(part, CONVOLUTIONS) for part in causal_lm.modules())


def runs_in_float32(call: LogpsArgs, options: LogpsOptions) -> bool:
    """
    Whether a trial without autocast rounds less than training does. Not where TF32 would round, engines cast by
    themselves, or rounding chooses experts; other attention than SDPA may not take float32, or is compiled for it, as
    a compiled model would be.
    """
    config, on_cuda = options.causal_lm.config, call.input_ids.is_cuda
    return (
        torch.is_autocast_enabled(call.input_ids.device.type)
        and options.processes == 1
        and models_compat.attention_implementation(config) == "sdpa"
        and not architecture.chooses_experts(config)
        and not any(map(torch_compat.is_compiled, call.model.modules()))
        and not (on_cuda and _rounds_to_tf32(options.causal_lm))
        and all(parameter.dtype == torch.float32 for parameter in call.model.parameters())
    )


def in_float32(errors: Callable[[], list[float]], causal_lm: PreTrainedModel, device_type: str) -> list[float] | None:
    """What `errors` returns without autocast; `None` where the model does not run without."""
    before = torch.is_autocast_enabled(device_type)
    # Accelerate enters autocast in the forward of the model: the modules in that leave it
    hooks = [
        module.register_forward_pre_hook(lambda *_: torch.set_autocast_enabled(device_type, False))
        for module in causal_lm.children()
    ]
    try:
        return errors()
    except (RowsRefusedError, CuSeqlensIgnoredError, PromptsNotSharedError):
        raise
    except Exception as error:
        logger.info(f"The first batch is tried under autocast alone, since float32 raises {error!r}")
        return None
    finally:
        for hook in hooks:
            hook.remove()
        torch.set_autocast_enabled(device_type, before)
