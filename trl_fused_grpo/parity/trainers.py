"""Builds the trainers of a case: stock, fused, stock with Liger's loss, and float64, all with the same weights."""

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from trl_fused_grpo._compat import trl as trl_compat

from .case import Batch, Case, Rollout, SkippedError, Trainer
from .tiny import save_checkpoint, tokenizer
from .tiny.batches import GROUP, ROWS
from .tiny.models import adapter_config


MAX_COMPLETION_LENGTH = 16
_BASE = {"beta": 0.0, "gradient_checkpointing": False, "per_device_train_batch_size": ROWS, "num_generations": GROUP}
PROMPTS = 16  # of the dataset: an epoch has two generation batches of four micro-batches

# TRL's Liger loss runs without Liger's layer kernels and uncompiled, so that it runs without a GPU too.
_NO_LAYER_KERNELS = dict.fromkeys(
    ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy"), False
)

# TRL's own class, also where `patch()` has replaced `trl.GRPOTrainer`.
StockGRPOTrainer: Any = next(cls for cls in GRPOTrainer.__mro__ if cls.__module__.startswith("trl."))


class RefusedError(Exception):
    """TRL itself refuses the case."""


@dataclass(frozen=True)
class Settings:
    """
    Where and in what precision comparisons run.

    Attributes:
        folder (`Path`): where checkpoints are kept while comparisons run.
        device (`str`): `"cpu"` or `"cuda"`.
        dtype (`torch.dtype`): `torch.float32`, or `torch.bfloat16` for weights and autocast in bfloat16.
        fused_class (`Callable`, *optional*): trainer class under test, [`FusedGRPOTrainer`] when left out.
    """

    folder: Path
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    fused_class: Callable[..., Trainer] | None = None


def has_liger_loss() -> bool:
    """Return `True` if the installed TRL has Liger's chunked loss (TRL <= 1.13)."""
    return hasattr(StockGRPOTrainer, "compute_liger_loss")


def config_options(config: Mapping[str, Any], config_class: Any = GRPOConfig) -> dict[str, Any]:
    """Return a case's options as the installed TRL names them. Where it lacks one, the case is skipped."""
    known = {option.name for option in fields(config_class)}
    options = {}
    for name, value in config.items():
        if name == "vllm_importance_sampling_clip_max":
            options[trl_compat.SAMPLING_CLIP_MAX] = value
        elif name in known:
            options[name] = deepcopy(value)  # transformers writes into dictionaries
        elif name != "vllm_importance_sampling_clip_min" and value:  # a falsy option is off where it does not exist
            raise SkippedError(f"this TRL has no `{name}`")
    return options


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Higher for longer completions, so that advantages normalised within a group do not cancel in the loss."""
    return [len(ids) / 10 + sum(ids) % 97 / 970 for ids in completion_ids]


@mock.patch.dict(os.environ)
def _build(
    cls: Callable[..., Trainer],
    case: Case,
    settings: Settings,
    config: Any,
    dtype: torch.dtype | None = None,
    change: Callable[[Trainer], None] | None = None,
    **extra: Any,
) -> Trainer:
    """Build a trainer that is ready for its first step. `change` gets it before the model is wrapped."""
    dtype = dtype or settings.dtype
    # `TrainingArguments` leaves the precision of one trainer in the environment, where the next would read it
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    try:
        checkpoint = save_checkpoint(case.model, settings.folder, settings.dtype)
        peft_config = adapter_config(case.adapter) if case.adapter else None
    except ImportError as missing:
        raise SkippedError(str(missing)) from missing
    default = {"loss_type": "dapo"} if issubclass(config, GRPOConfig) else {}
    options = {**_BASE, **default, "bf16": dtype == torch.bfloat16, **config_options(case.config, config), **extra}
    args = config(
        output_dir=str(settings.folder / "output"),
        report_to="none",
        disable_tqdm=True,
        use_cpu=settings.device == "cpu",
        max_completion_length=MAX_COMPLETION_LENGTH,
        model_init_kwargs={"dtype": str(dtype).removeprefix("torch."), "device_map": None},
        **options,
    )
    args._n_gpu = min(args.n_gpu, 1)  # with several visible GPUs, TRL would use nn.DataParallel
    trainer = cls(
        model=str(checkpoint),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6"] * PROMPTS}),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    if change is not None:
        change(trainer)
    if case.frozen_head:
        trainer.model.get_output_embeddings().requires_grad_(False)
    for name, parameter in trainer.model.named_parameters():
        if name.endswith(case.frozen):
            parameter.requires_grad_(False)
    data = case.data
    if (isinstance(data, Batch) and data.ratio) or (isinstance(data, Rollout) and data.sampling):
        trainer.use_vllm = True  # the constructor would start vLLM
        trainer._last_loaded_step = trainer.state.global_step
    if isinstance(data, Batch) and data.tool_mask:
        trainer.tools = [reward]  # TRL 0.27 reads the mask only when there are tools
    # As in `Trainer.train`: under mixed precision this wraps `forward`, around whatever the trainer wrapped.
    trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)
    return trainer


def stock_trainer(
    case: Case, settings: Settings, cls: Callable[..., Trainer] = StockGRPOTrainer, config: Any = GRPOConfig
) -> Trainer:
    """
    Build stock TRL's trainer without Liger. Where TRL refuses the case's adapter, it computes on dense logits.

    Args:
        case ([`Case`]): what is compared.
        settings ([`Settings`]): device and dtype.
        cls (`Callable`, *optional*, defaults to TRL's `GRPOTrainer`): TRL's class or a subclass.
        config (`type`, *optional*, defaults to `GRPOConfig`): the class of its arguments.
    """
    if case.adapter == "head" and trl_compat.REFUSES_ADAPTER_ON_HEAD:
        with trl_compat.adapter_on_head_allowed():
            return _build(cls, case, settings, config, change=_compute_densely)
    return _build(cls, case, settings, config)


def fused_trainer(case: Case, settings: Settings, config: Any = GRPOConfig) -> Trainer:
    """Build the trainer under test, of which `config` is the class of TRL's arguments."""
    from trl_fused_grpo import FusedGRPOTrainer, fuse_config

    if case.fused:  # else TRL's own config is enough
        config = fuse_config(config)
    return _build(settings.fused_class or FusedGRPOTrainer, case, settings, config, use_liger_loss=True, **case.fused)


def stock_liger_trainer(case: Case, settings: Settings) -> Trainer:
    """
    Build stock TRL's trainer with Liger's chunked loss.

    Raises:
        [`RefusedError`]: when TRL refuses the case.
    """

    def run_uncompiled(trainer: Trainer) -> None:
        loss = trainer.liger_loss if hasattr(trainer, "liger_loss") else trainer.liger_grpo_loss
        loss.compiled = False

    liger: dict[str, Any] = {"use_liger_kernel": True, "liger_kernel_config": _NO_LAYER_KERNELS}
    try:
        return _build(StockGRPOTrainer, case, settings, GRPOConfig, change=run_uncompiled, **liger)
    except (ValueError, NotImplementedError) as error:
        raise RefusedError(str(error)) from error


def float64_trainer(case: Case, settings: Settings, cls: Callable[..., Trainer] = StockGRPOTrainer) -> Trainer:
    """
    Build the reference for bfloat16: stock TRL's objective on dense float64 log-probs and entropies.

    Weights and activations are float64. Transformers writes RMS norms, routers and Mamba-2's logits in float32 whatever
    the model's dtype, which leaves an error of order 1e-7, four orders of magnitude below bfloat16's.
    """

    def compute_in_float64(trainer: Trainer) -> None:
        for model in filter(None, (trainer.model, trainer.ref_model)):
            model.double()
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("eager")  # the grouped GEMM has no float64
        _compute_densely(trainer)

    options = {name: value for name, value in case.config.items() if name != "cast_lm_head_to_fp32"}
    with trl_compat.adapter_on_head_allowed():
        return _build(
            cls, replace(case, config=options), settings, GRPOConfig, torch.float32, change=compute_in_float64
        )


def _compute_densely(trainer: Trainer) -> None:
    trainer._get_per_token_logps_and_entropies = MethodType(_dense_log_probs, trainer)


def _dense_log_probs(
    trainer: Trainer,
    model: torch.nn.Module,
    input_ids: torch.Tensor,  # [B, P + T]
    attention_mask: torch.Tensor,  # [B, P + T]
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **images: Any,  # also how many images and tiles each prompt has
) -> tuple[torch.Tensor | None, ...]:
    dtype = next(model.parameters()).dtype
    tensors = {name: value for name, value in images.items() if isinstance(value, torch.Tensor)}
    extra: dict[str, Any] = {n: v.to(dtype) if v.is_floating_point() else v for n, v in tensors.items()}
    if compute_aux_loss:
        extra["output_router_logits"] = True
    outputs = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **extra)
    logits = outputs.logits[:, -logits_to_keep - 1 : -1]  # [B, T, V]
    if logits.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"The reference's logits are {logits.dtype}.")
    log_p = (logits.double() / trainer.temperature).log_softmax(-1)
    logps = log_p.gather(-1, input_ids[:, -logits_to_keep:].unsqueeze(-1)).squeeze(-1)  # [B, T]
    logps = logps.to(torch.promote_types(dtype, torch.float32))
    entropies = -(log_p.exp() * log_p).sum(-1).to(logps.dtype) if compute_entropy else None
    return trl_compat.logps_result(logps, entropies, outputs.aux_loss if compute_aux_loss else None)


def noisy_weights(trainer: Trainer, noise: float) -> dict[str, torch.Tensor]:
    """Copy a model's parameters to the CPU, by name. Those that need a gradient get seeded noise."""
    generator = torch.Generator().manual_seed(1)
    result = {}
    for name, parameter in trainer.model.named_parameters():
        value = parameter.detach().cpu()
        if noise and parameter.requires_grad:
            value = value + noise * torch.randn(value.shape, generator=generator).to(value.dtype)
        result[name] = value.clone()
    return result


def load_weights(trainer: Trainer, values: Mapping[str, torch.Tensor]) -> Trainer:
    """Copy `values` into a trainer's model, in the model's own dtype."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(values[name])
    return trainer
