"""The trainers of TRL that have a fused subclass here, and how they differ."""

import inspect
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from trl_fused_grpo._utils import temporary_attr

from .required import TRL


# The trainers of TRL whose methods the fused trainers override, and the classes of their arguments
TRAINERS: tuple[Any, ...] = (GRPOTrainer, RLOOTrainer)
CONFIGS: tuple[type, ...] = (GRPOConfig, RLOOConfig)

# The methods of a trainer that run between a generation and the moment when the weights move: with what they are given
# or with what is around them they may see a micro-batch, its loss or its gradients. `_run_epoch`: transformers >= 5.
# TRL's `_compute_loss` calls further ones (`trl.OBJECTIVE_METHODS`)
STEP_METHODS = (
    *("_inner_training_loop", "_run_epoch", "get_batch_samples", "training_step", "floating_point_ops"),
    *("compute_loss_context_manager", "autocast_smart_context_manager", "_prepare_inputs", "_prepare_input"),
    *("_generate_and_score_completions", "compute_loss", "compute_liger_loss", "_compute_loss"),
    *("_get_per_token_logps_and_entropies", "_track_num_input_tokens", "_prepare_context_parallel_inputs"),
)


def trl_class(cls: type) -> type:
    """The trainer of TRL, one of [`TRAINERS`] or the asynchronous one, that a class is or inherits from."""
    return next(one for one in cls.__mro__ if one in TRAINERS or is_async(one))


# RLOO: one ratio for each sequence, of which micro-batches keep the sum of the old log-probs. Its KL term is a part of
# the reward. It has one loss, the mean over the sequences of a micro-batch, and no correction of vLLM's sampling


def is_rloo(trainer: Any) -> bool:
    """Return `True` if a trainer is an `RLOOTrainer`."""
    return isinstance(trainer, RLOOTrainer)


def beta_of_loss(trainer: Any) -> float:
    """Coefficient of the KL term in the loss. While TRL's own loss leaves the term out, it is `_fused_beta`."""
    return 0.0 if is_rloo(trainer) else getattr(trainer, "_fused_beta", trainer.beta)


def corrects_sampling(trainer: Any) -> bool:
    """Return `True` if TRL multiplies the loss by vLLM's importance ratio."""
    return trainer.use_vllm and getattr(trainer, "vllm_importance_sampling_correction", False)


def casts_head(trainer: Any) -> bool:
    """Return `True` if the output projection runs in float32; RLOO has no option for it."""
    return getattr(trainer.args, "cast_lm_head_to_fp32", False)


# `AsyncGRPOTrainer` is experimental: to import it warns, so that it is known by its name

_ASYNC = "trl.experimental.async_grpo.async_grpo_trainer"
# The functions of its module that are replaced while it is made
_ASYNC_FUNCTIONS = ("create_model_from_path", "add_fused_lm_head", "get_peak_flops_per_device")
# What else of its module, of the trainer and of its batches is used here (TRL >= 1.16)
_ASYNC_NAMES = {
    *("fused_lm_head", "shift_labels", "token_index", "advantages", "old_log_probs", "input_ids", "position_ids"),
    *("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k", "output_router_logits"),
    *("epsilon_low", "epsilon_high", "_metrics", "log_probs", "entropy", "aux_loss"),
    *("training_step", "train", "_log_step_metrics", "compute_flops_per_token", "TREE_ATTENTION"),
}


def is_async(cls: type) -> bool:
    """Return `True` if a class is TRL's `AsyncGRPOTrainer`."""
    return (cls.__module__, cls.__name__) == (_ASYNC, "AsyncGRPOTrainer")


def is_config_class(cls: Any) -> bool:
    """Return `True` if a class is, or inherits from, one of [`CONFIGS`] or `AsyncGRPOConfig`."""
    names = _ASYNC.removesuffix("trainer") + "config", "AsyncGRPOConfig"
    return any(one in CONFIGS or (one.__module__, one.__name__) == names for one in cls.__mro__)


def async_module() -> Any:
    """The module of `AsyncGRPOTrainer`, which is imported."""
    return sys.modules[_ASYNC]


def check_async(cls: Any) -> None:
    """Refuse an `AsyncGRPOTrainer` with another interface."""
    code = inspect.unwrap(cls.compute_loss).__code__
    words = {*code.co_names, *vars(async_module()), *dir(cls)}
    for const in code.co_consts:
        words.update(const if isinstance(const, tuple) else [const])
    missing = sorted({*_ASYNC_FUNCTIONS, *_ASYNC_NAMES} - words)
    if missing:
        raise ImportError(
            f"trl_fused_grpo cannot extend the AsyncGRPOTrainer of TRL {TRL}, which has no {', '.join(missing)}: "
            "install trl==1.16.0."
        )


def fused_output(**fields: Any) -> Any:
    """What a model returns that TRL calls with `fused_lm_head=True`."""
    from trl.trainer.utils import FusedCausalLMOutput  # TRL >= 1.16

    return FusedCausalLMOutput(**fields)


@contextmanager
def all_layers_allowed() -> Generator[list[str], None, None]:
    """
    While it lasts, the constructor of `AsyncGRPOTrainer` takes a CPU, whose peak FLOPs it cannot look up, and layers
    that its own attention cannot serve. Yields a list of these.
    """
    module, refused = async_module(), list[str]()
    own = {name: getattr(module, name) for name in _ASYNC_FUNCTIONS}

    def create(*args: Any, **kwargs: Any) -> Any:
        model = own["create_model_from_path"](*args, **kwargs)
        types = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())}
        refused.extend(sorted(types - {"full_attention", "sliding_attention"}))
        parameters = model.named_parameters
        if any(name.endswith(".sinks") for name, _ in parameters()):
            refused.append("attention sinks")
            # It looks at the ends of their names
            model.named_parameters = lambda *args, **kwargs: ((f"{n} ", p) for n, p in parameters(*args, **kwargs))
        return model

    def add_head(model: Any, *args: Any, **kwargs: Any) -> None:
        vars(model).pop("named_parameters", None)
        own["add_fused_lm_head"](model, *args, **kwargs)

    def peak_flops(accelerator: Any, dtype: str) -> float | None:
        return own["get_peak_flops_per_device"](accelerator, dtype) if accelerator.device.type == "cuda" else None

    try:
        module.create_model_from_path, module.add_fused_lm_head = create, add_head
        module.get_peak_flops_per_device = peak_flops
        module.set = lambda names=(): {*names}.difference(refused)  # of layer types
        yield refused
    finally:
        del module.set
        for name, function in own.items():
            setattr(module, name, function)


@contextmanager
def unknown_flops_allowed() -> Generator[None, None, None]:
    """While it lasts, a model whose FLOPs TRL cannot count has no MFU, where its own trainer would raise."""
    module: Any = async_module()
    count = module.compute_flops_per_token

    def counted(config: Any, length: int) -> float:
        try:
            return count(config, length)
        except AttributeError:  # of many models with experts
            return float("nan")

    with temporary_attr(module, "compute_flops_per_token", counted):
        yield
