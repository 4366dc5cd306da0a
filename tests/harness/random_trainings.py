"""
Whole trainings drawn at random: what a user changes, taken from the cases of `--customised`, and beside it options of
the trainer's own, which those cases leave as they are.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from trl import GRPOConfig

from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.parity.case import Rollout, SkippedError
from trl_fused_grpo.parity.tiny.families import FAMILIES

from .case import UNEVEN_LENGTHS, Customisation, Training
from .cases import CUSTOMISED_CASES
from .drawing import Draw, Options


MODELS = ("qwen2", "qwen3", "gemma2", "gemma3", "cohere", "gpt2", "moe", "lfm2", "qwen3.5", "falcon-h1", "tied")
ADAPTERS = ("attention", "head-copy", "ia3")
DATA = ("sampling", "nan", "env_mask", "truncated_rows", "equal_completions")
# Each a set of options that belong together, of which some values are drawn. Of the optimizers that divide by the size
# of a gradient only one that adds something to it: the others make a full step of mere rounding
TRAINER_OPTIONS: tuple[dict[str, tuple[Any, ...]], ...] = (
    {"optim": ("adamw_torch", "adamw_torch_fused"), "learning_rate": (0.002,), "adam_epsilon": (1e-3,)},
    {"optim_args": ("momentum=0.9", "momentum=0.5,nesterov=True"), "learning_rate": (0.2,)},
    {"lr_scheduler_type": ("linear", "cosine", "constant_with_warmup", "inverse_sqrt"), "warmup_steps": (0, 1, 2)},
    {"max_grad_norm": (0.0, 1e-3, 0.1, 1e9)},
    {"weight_decay": (0.1,)},
    {"logging_steps": (2, 3), "logging_first_step": (False, True), "logging_nan_inf_filter": (False, True)},
    {"eval_strategy": ("steps",), "eval_steps": (1, 2), "eval_delay": (0, 1), "per_device_eval_batch_size": (3, 6)},
    {"eval_strategy": ("steps",), "eval_steps": (2,), "eval_on_start": (True,), "num_generations_eval": (1, 3)},
    {"num_train_epochs": (1, 2), "max_steps": (-1,), "dataloader_drop_last": (False, True)},
    {"gradient_checkpointing": (True,), "gradient_checkpointing_kwargs": ({"use_reentrant": True}, None)},
    {"neftune_noise_alpha": (5.0,)},
    {"scale_rewards": ("batch", "none")},
    {"mask_truncated_completions": (True,)},
    {"beta": (0.3,), "sync_ref_model": (True,), "ref_model_sync_steps": (1, 2), "ref_model_mixup_alpha": (0.5, 1.0)},
    {"accelerator_config": ({"gradient_accumulation_kwargs": {"sync_each_batch": True}}, {"split_batches": True})},
    {"shuffle_dataset": (False,)},
    {"disable_dropout": (True,)},
    {"cast_lm_head_to_fp32": (True,)},
    {"pad_to_multiple_of": (8,)},
    {"torch_empty_cache_steps": (1,)},
    {"include_num_input_tokens_seen": ("all",), "logging_strategy": ("epoch", "steps")},
    {"average_tokens_across_devices": (False,), "label_smoothing_factor": (0.1,), "prediction_loss_only": (True,)},
    {"debug": ("underflow_overflow",)},
    {"save_strategy": ("steps",), "save_steps": (1,), "save_total_limit": (1,)},
)
# Without `top_entropy_quantile`: first tokens of completions to one prompt have one entropy, and which of them rounding
# leaves in takes hundreds of trainings to tell; single steps have it
OBJECTIVE: tuple[dict[str, tuple[Any, ...]], ...] = (
    {"loss_type": ("grpo", "bnpo", "dr_grpo", "cispo", "sapo")},
    {"loss_type": ("luspo",), "importance_sampling_level": ("sequence",)},
    {"importance_sampling_level": ("sequence",)},
    {"beta": (0.3,), "use_bias_correction_kl": (False, True)},
    {"delta": (1.5, 3.0)},
    {"epsilon": (0.1, 0.01), "epsilon_high": (0.3,)},
    {"temperature": (0.7, 1.3)},
    {"off_policy_mask_threshold": (0.1, 0.5)},
    {"entropy_coef": (0.05,)},
)
WINDOWS: tuple[dict[str, tuple[Any, ...]], ...] = (
    {"gradient_accumulation_steps": (1, 2, 3)},
    {"steps_per_generation": (1, 2, 6, 8, 12)},
    {"num_iterations": (2, 3)},
)
FUSED: tuple[dict[str, tuple[Any, ...]], ...] = (
    {"fused_backward": ("recompute",)},
    {"fused_logits_mib": (0.05,)},
    {"fused_share_prompts": (False,)},
    {"fused_skip_old_logps": (True, False)},
    {"fused_memory": (0.5,)},
    {"fused_verify": (1,)},
)

_PLAIN = Training("plain", "nothing is changed", data=Rollout(lengths=UNEVEN_LENGTHS))
# Without an update, rounding alone decides where an optimizer goes
_CUSTOMISED = {case.name: case for case in CUSTOMISED_CASES if not case.customised.has_no_update}


def draw_training(seed: int, index: int) -> Options:
    """
    Draw the options of a training.

    Args:
        seed (`int`):
            Of a sequence of trainings.
        index (`int`):
            Which of them.

    Returns:
        `dict[str, Any]`:
            What [`training_of`] takes, in types that JSON has.
    """
    drawing = Draw(f"training {seed}:{index}")
    options = drawing.options
    options["seed"] = drawing.generator.randrange(1, 1_000_000)
    drawing.maybe(0.6, "customised", *_CUSTOMISED)
    drawing.maybe(0.3, "model", *MODELS)
    drawing.maybe(0.2, "adapter", *ADAPTERS)
    for probability, sets in ((0.08, TRAINER_OPTIONS), (0.08, OBJECTIVE), (0.3, WINDOWS), (0.06, FUSED)):
        for one in sets:
            if drawing.chance(probability):
                options.update({name: drawing.generator.choice(values) for name, values in one.items()})
    if drawing.maybe(0.3, "sampling", "token", "sequence"):
        modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        options["vllm_importance_sampling_mode"] = drawing.generator.choice(modes)
        drawing.maybe(0.2, "nan", True)
    drawing.maybe(0.15, "env_mask", True)
    drawing.some(0.2, "truncated_rows", 6)
    drawing.maybe(0.1, "equal_completions", True)
    return {name: value for name, value in options.items() if value is not None}


def training_of(name: str, options: Mapping[str, Any]) -> Training:
    """
    The training with these options, as drawn or some of them. What a customised case needs stays as it is there;
    options that its trainer lacks are left out.
    """
    given = dict(options)
    base = _CUSTOMISED[given.pop("customised")] if "customised" in given else _PLAIN
    custom, data = base.customised, base.data
    assert isinstance(data, Rollout)
    of_data = {name: given.pop(name) for name in DATA if name in given}
    if "truncated_rows" in of_data:
        of_data["truncated_rows"] = tuple(of_data["truncated_rows"])
    fused = {name: given.pop(name) for name in list(given) if name.startswith("fused_")}
    model, adapter, seed = (given.pop(name, getattr(Training, name)) for name in ("model", "adapter", "seed"))
    model = model if base.model == Training.model else base.model
    if trl_compat.RETURNS_AUX_LOSS:  # TRL's own default would ask models for it that have none
        given.setdefault("router_aux_loss_coef", 0.0)
    known = _known_options(custom)
    return replace(
        base,
        name=name,
        description=", ".join(f"{option}={value}" for option, value in options.items()),
        config={**{option: value for option, value in given.items() if option in known}, **base.config},
        data=replace(data, **of_data),
        model=model,
        adapter=base.adapter or adapter,
        frozen=FAMILIES[model].flat if model in FAMILIES else (),
        noise=0.02,
        fused={**fused, **base.fused},
        recomputed="any",
        customised=replace(custom, forwards=None),  # an option may forbid what it asks for
        seed=seed,
        drawn=True,
    )


def _known_options(custom: Customisation) -> set[str]:
    try:
        config_class: Any = GRPOConfig if custom.load_config is None else custom.load_config()
    except SkippedError:  # said when the case runs
        config_class = GRPOConfig
    return {option.name for option in fields(config_class)}
