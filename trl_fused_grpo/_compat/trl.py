"""
What depends on the version of TRL or accelerate, and their private names. Each entry says what differs, since when or
until when; it can be removed when the oldest supported version has passed that.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import fsdp_utils
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from trl.extras.profiling import profiling_decorator as profiling_decorator
from trl.trainer import utils

from trl_fused_grpo._utils import temporary_attr

from .libraries import is_own_module, replaced_name
from .required import SAMPLING_CLIP_MAX as SAMPLING_CLIP_MAX
from .required import TRANSFORMERS, names_in
from .required import TRL as TRL
from .trainers import TRAINERS


logger = logging.get_logger(__name__)

# TRL >= 1.7: the log-prob method returns the auxiliary loss of Mixture-of-Experts models as a third value
RETURNS_AUX_LOSS = "compute_aux_loss" in inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters

# The names of its arguments, in order: TRL 1.14 takes those after the fourth by name alone
_LOGPS_PARAMETERS = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters.values())[1:]
LOGPS_ARGUMENTS = tuple(p.name for p in _LOGPS_PARAMETERS if p.kind is p.POSITIONAL_OR_KEYWORD)
if "input_ids" not in LOGPS_ARGUMENTS:
    LOGPS_ARGUMENTS = ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size")  # RLOO's has names

_GENERATION_CODES = [inspect.unwrap(cls._generate_and_score_completions).__code__ for cls in TRAINERS]


def is_asked_by_generation() -> bool:
    """
    Return `True` if a call of the log-prob method comes from TRL's own generation, not from the user's code in it.
    """
    frame = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != profiling_decorator.__module__ and not is_own_module(module):
            break
        frame = frame.f_back
    return frame is not None and frame.f_code in _GENERATION_CODES


def logps_result(logps: Tensor, entropies: Tensor | None, aux_loss: Tensor | None) -> tuple[Tensor | None, ...]:
    """What TRL expects of its `_get_per_token_logps_and_entropies`: the auxiliary loss from TRL 1.7 on alone."""
    return (logps, entropies, aux_loss) if RETURNS_AUX_LOSS else (logps, entropies)


def call_trl_logps(
    method: Callable,
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch_size: int | None,
    compute_entropy: bool,
    compute_aux_loss: bool,
    multimodal: dict[str, Any],
) -> tuple[Any, Any, Any]:
    """
    Call TRL's own log-prob method, bound, with its arguments. An auxiliary loss is asked for where this TRL knows one.

    Returns:
        `tuple`: log-probs, entropies and auxiliary loss; each may be `None` but the first.
    """
    flags = {"batch_size": batch_size, "compute_entropy": compute_entropy}  # TRL 1.14 takes them by name only
    if RETURNS_AUX_LOSS:
        flags["compute_aux_loss"] = compute_aux_loss
    logps, entropies, *aux_loss = method(model, input_ids, attention_mask, logits_to_keep, **flags, **multimodal)
    return logps, entropies, aux_loss[0] if aux_loss else None


def metrics_of(trainer: Any, mode: str = "train") -> dict[str, list[float]]:
    """The metrics that a trainer will log in a mode, `"train"` or `"eval"`: a list of values for each name."""
    return trainer._metrics[mode]


def step_of(trainer: Any) -> int:
    """The number of training steps, one a micro-batch, that a trainer has done."""
    return trainer._step


def buffered_micro_batches(trainer: Any) -> list[dict[str, Any]]:
    """The micro-batches of the generation batch in use; none before the first."""
    return trainer._buffered_inputs or []


def steps_per_generation(trainer: Any) -> int:
    """Micro-batches in a generation batch."""
    return int(trainer.args.steps_per_generation or 1)


def steps_of_generation_batch(trainer: Any) -> int:
    """Training steps that use a generation batch: its micro-batches times `num_iterations`."""
    return steps_per_generation(trainer) * trainer.num_iterations


def has_aux_loss(trainer: Any) -> bool:
    """Return `True` if the loss has the auxiliary loss of a Mixture-of-Experts model (TRL >= 1.7)."""
    return getattr(trainer, "aux_loss_enabled", False)


def has_entropy_bonus(trainer: Any) -> bool:
    """Return `True` if the loss has an entropy bonus (TRL >= 1.8)."""
    return getattr(trainer, "_entropy_bonus_enabled", False)


def last_entropy(trainer: Any) -> float:
    """The mean entropy that decides whether an adaptive entropy bonus is on, of a trainer that has a bonus."""
    return trainer._last_world_entropy


# TRL < 1.15: log-probs, and the auxiliary loss, come from the model's own forward. Later ones have a fused head, whose
# entropies always carry a gradient, and take every family's auxiliary loss from Mixtral's function
LOGPS_FROM_LOGITS = not hasattr(utils, "add_fused_lm_head")


def entropies_as_trl(trainer: GRPOTrainer, entropies: Tensor | None) -> Tensor | None:
    """
    Entropies with a gradient where TRL's have one: from TRL 1.15 on always, from 1.8 on with an entropy bonus, before
    never.
    """
    carry = not LOGPS_FROM_LOGITS or has_entropy_bonus(trainer)
    return entropies if entropies is None or carry else entropies.detach()


def shares_sequences(trainer: Any) -> bool:
    """
    Return `True` if several processes train on the same sequences: tensor, context or sequence parallelism
    (accelerate).
    """
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return getattr(config, "non_data_parallel_size", 1) > 1


# The methods of the trainer that TRL's `_compute_loss` calls: they differ from version to version
OBJECTIVE_METHODS = tuple(
    name
    for name in inspect.unwrap(GRPOTrainer._compute_loss).__code__.co_names
    if name != "_get_per_token_logps_and_entropies" and inspect.isfunction(getattr(GRPOTrainer, name, None))
)

# Of TRL's files, of torch and of tensors what TRL < 1.15 computes log-probs of logits with
_LOGPS_UTILITIES = ("selective_log_softmax", "entropy_from_logits")


@functools.cache
def _called_for_logps() -> set[str]:
    methods = [cls._get_per_token_logps_and_entropies for cls in TRAINERS]
    functions = [vars(utils)[name] for name in _LOGPS_UTILITIES if name in vars(utils)]
    return {*_LOGPS_UTILITIES}.union(*(names_in(inspect.unwrap(one).__code__) for one in (*methods, *functions)))


def replaced_in_logps() -> str | None:
    """A function that TRL's own log-prob method calls and that somebody has replaced, in words, or `None`."""
    files = [utils, *(sys.modules[cls.__module__] for cls in TRAINERS), torch, torch.nn.functional, torch.Tensor]
    for file in files:
        name = replaced_name(vars(file), _called_for_logps() & vars(file).keys())
        if name is not None:
            return f"{name} of {file.__name__}, which was replaced,"
    return None


# TRL >= 1.15 knows one name of a softcap, the forwards of models all (RecurrentGemma and xLSTM have names of their own)
SOFTCAPS = ("final_logit_softcapping", *(("logits_soft_cap", "output_logit_soft_cap") if LOGPS_FROM_LOGITS else ()))
# TRL < 1.14: log-probs of padding are computed too, later they are zero
COMPUTES_LOGPS_OF_PADDING = Version("1.14.0") > TRL

# TRL >= 1.9.1: `num_items_in_batch` is rescaled from the generation batch to one accumulation window
_RESCALES_NUM_ITEMS = Version("1.9.1") <= TRL
# TRL 1.8 and 1.9: the entropy bonus of DAPO, CISPO and VESPO shares the policy term's normalizer
_ENTROPY_SHARES_NORMALIZER = Version("1.8.0") <= TRL < Version("1.10.0")
# TRL < 1.10: LUSPO averages over padding too (`loss/reduction.py` says when)
LUSPO_COUNTS_PADDING = Version("1.10.0") > TRL
# TRL >= 1.11: a token whose log-prob the sampler could not give (NaN) gets importance ratio one
NAN_RATIO_IS_ONE = Version("1.11.0") <= TRL
# TRL < 0.29: the tool mask counts only where the trainer has tools
_TOOL_MASK_NEEDS_TOOLS = Version("0.29.0") > TRL
# accelerate before its pull request 3630 (2025): every backward steps DeepSpeed's engine, which counts them
DEEPSPEED_STEPS_WITH_BACKWARD = "sync_gradients" not in inspect.signature(DeepSpeedEngineWrapper.backward).parameters


def forget_order_of_modules(model: Any) -> None:
    """
    Have DeepSpeed's ZeRO-3, after a forward without backward, learn anew in which order the modules of a model run.

    It remembers for good which weights each step of a complete order releases. An order without backward would have it
    release every weight after the forward, and gather them one by one in the backward, for the whole training.
    """
    offload = getattr(getattr(model, "optimizer", None), "parameter_offload", None)
    coordinator = getattr(offload, "param_coordinator", None)
    if hasattr(coordinator, "_invalidate_trace") and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


# accelerate >= 1.14 has FSDP2 shard embedding and head apart, and torch >= 2.13 refuses a weight that both have
FSDP2_FORBIDS_TIES_OF_HEADS = hasattr(fsdp_utils, "_find_final_norm") and Version(torch.__version__).release >= (2, 13)


def loss_mask(trainer: GRPOTrainer, inputs: dict[str, Any]) -> Tensor:
    """The positions that count in the loss `[B, T]`."""
    if "tool_mask" not in inputs or (_TOOL_MASK_NEEDS_TOOLS and not trainer.tools):
        return inputs["completion_mask"]
    return inputs["completion_mask"] * inputs["tool_mask"]


def global_normalizer(trainer: Any, inputs: dict[str, Any]) -> Tensor:
    """Tokens of one accumulation window per process: what a loss with a global normalizer divides by; a scalar."""
    normalizer = inputs["num_items_in_batch"] / trainer.accelerator.num_processes
    if _RESCALES_NUM_ITEMS and trainer.model.training:  # in evaluation a batch is neither split nor accumulated
        normalizer = normalizer * trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
    return normalizer


def entropy_normalizer(trainer: GRPOTrainer, mask: Tensor, normalizer: Tensor | float | None) -> Tensor | float:
    """
    What the sum of entropies is divided by in the entropy bonus; `normalizer` is the [`global_normalizer`] of a loss
    type that has one.
    """
    if _ENTROPY_SHARES_NORMALIZER and normalizer is not None:
        return normalizer
    return mask.sum().clamp(min=1.0) * trainer.current_gradient_accumulation_steps


def sampling_clip_range(trainer: GRPOTrainer) -> tuple[float | None, float | None]:
    """Lower and upper bound of vLLM's importance ratio. TRL < 1.6 has an upper one alone, see `SAMPLING_CLIP_MAX`."""
    return getattr(trainer, "vllm_importance_sampling_clip_min", None), getattr(trainer, SAMPLING_CLIP_MAX, None)


def without_liger_flag(args: GRPOConfig | None) -> AbstractContextManager[None]:
    """
    Hide `use_liger_kernel` from TRL's constructor, while it lasts.

    Up to TRL 1.14 it selects TRL's own Liger loss, which refuses combinations that are supported here; from 1.15 on it
    is deprecated. The layer kernels that it stands for too are applied afterwards.
    """
    # Without arguments TRL makes some of its own, in which the flag is off
    return nullcontext() if args is None else temporary_attr(args, "use_liger_kernel", False)


# TRL >= 1.15 refuses a PEFT adapter on the output projection
REFUSES_ADAPTER_ON_HEAD = hasattr(sys.modules[GRPOTrainer.__module__], "BaseTunerLayer")


@contextmanager
def adapter_on_head_allowed() -> Generator[None, None, None]:
    """
    Lift TRL's refusal of a PEFT adapter on the output projection (TRL >= 1.15), while it lasts: TRL's own log-probs
    would leave the adapter out, the fused ones do not.
    """
    with ExitStack() as stack:
        for cls in TRAINERS if REFUSES_ADAPTER_ON_HEAD else ():
            # Nothing is an instance of it
            stack.enter_context(temporary_attr(sys.modules[cls.__module__], "BaseTunerLayer", ()))
        yield


def apply_liger_layer_kernels(model: PreTrainedModel, args: GRPOConfig) -> None:
    """
    Replace the model's layers by Liger's, but not its forward, for good.

    With transformers < 5 this happens now. Later ones do it when training starts, from `args.liger_kernel_config`: a
    copy of that dictionary, with the kernels of the head off, takes its place for good. TRL >= 1.15 does the same.
    """
    config = {**(args.liger_kernel_config or {}), "fused_linear_cross_entropy": False, "cross_entropy": False}
    if TRANSFORMERS.major >= 5:
        args.liger_kernel_config = config
        return
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, **config)


def leave_layers(args: Any) -> None:
    """Train with the fused loss alone where `use_liger_kernel` asks for layer kernels that cannot run. Logged once."""
    logger.warning_once(
        "use_liger_kernel=True: the loss is fused, but the model's layers stay as they are, because Liger's kernels "
        "for them need a GPU."
    )
    args.use_liger_loss, args.use_liger_kernel = True, False
