"""
Cases drawn at random: a set of options by name, a pure function of a seed and an index. A case is written as
`random:<seed>:<index>`, a whole training as `random:training:<seed>:<index>`, and each as `random:` and its options in
JSON.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trl import GRPOConfig

from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.parity.case import LENGTHS, Batch, Case, Lengths, Rollout
from trl_fused_grpo.parity.tiny.batches import GROUP, ROWS
from trl_fused_grpo.parity.tiny.families import FAMILIES, VARIANTS

from . import census
from .case import UNEVEN_LENGTHS, Customisation, DrawnCase, Training
from .drawing import Draw, Options, draw_last_options
from .random_trainings import draw_training, training_of
from .stepwise import CUSTOMISATIONS


PREFIX = "random:"
TRAINING = "training"  # the option of a drawn training that says what it is

# Two models with the same weights draw other numbers in dropout
MODELS = tuple(name for name in (*FAMILIES, *VARIANTS) if "dropout" not in name)
# Its router draws numbers in training, more for rows with padding: TRL then shuffles generation batches otherwise
_DRAWS_NUMBERS = ("phimoe",)
ADAPTERS = ("attention", "head", "head-copy", "tied-copy", "ia3", "prompt-tuning", "prefix-tuning")
# (loss type, options it needs)
LOSS_TYPES: tuple[tuple[str, Options], ...] = (
    ("grpo", {}),
    ("bnpo", {}),
    ("dr_grpo", {}),
    ("cispo", {"epsilon_high": 2.0}),
    ("sapo", {}),
    ("luspo", {"importance_sampling_level": "sequence"}),
    ("vespo", {}),
)
# Options that not every release of TRL has
_DRAWN_OF_TRL = {
    *("pad_to_multiple_of", "entropy_coef", "use_adaptive_entropy", "entropy_target", "use_bias_correction_kl"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "off_policy_mask_threshold"),
}
_OF_CASE = ("model", "adapter", "frozen_head", "mode", "accumulation_windows", "update", "seed")


def draw(seed: int, index: int) -> Options:
    """
    Draw the options of a case.

    Args:
        seed (`int`):
            Of a sequence of cases.
        index (`int`):
            Which of them.

    Returns:
        `dict[str, Any]`:
            What [`case_of`] takes, in types that JSON has. The same for every release of TRL.
    """
    drawing = Draw(f"{seed}:{index}")
    drawing.options["seed"] = drawing.generator.randrange(1, 1_000_000)
    _draw_model(drawing)
    _draw_window(drawing)
    _draw_objective(drawing)
    draw_data = _draw_rollout if drawing.options.get("rollout") else _draw_batch
    draw_data(drawing)
    _draw_fused_options(drawing)
    _draw_customisation(drawing)
    draw_last_options(drawing)
    return drawing.options


def _draw_model(drawing: Draw) -> None:
    drawing.maybe(0.7, "model", *MODELS)
    if _has_aux_loss(drawing.options.get("model", Case.model)):
        drawing.maybe(0.5, "router_aux_loss_coef", 0.3)
    drawing.maybe(0.25, "adapter", *ADAPTERS)
    drawing.maybe(0.1, "frozen_head", True)
    if drawing.options.get("adapter") != "head":  # refused, see [`checks.check_head`]
        drawing.maybe(0.1, "cast_lm_head_to_fp32", True)
    drawing.maybe(0.1, "gradient_checkpointing", True)


def _draw_window(drawing: Draw) -> None:
    options = drawing.options
    drawing.maybe(0.5, "rollout", True)
    drawing.maybe(0.06, "mode", "eval", "eval", "log-probs")
    if options.get("mode") == "log-probs" or options.get("model") in _DRAWS_NUMBERS:  # of finished micro-batches
        options.pop("rollout", None)
    drawing.maybe(0.5, "gradient_accumulation_steps", 2, 2, 3, 4)
    drawing.maybe(0.3, "steps_per_generation", 1, 2, 3, 4)
    drawing.maybe(0.3, "accumulation_windows", 2, 2, 3)
    if options.get("accumulation_windows"):
        drawing.maybe(0.7, "update", True)
        drawing.maybe(0.4, "num_iterations", 2)
    drawing.maybe(0.4, "rows", 2, 3, 4, 8)
    drawing.maybe(0.6, "lengths", drawing.generator.randrange(1_000_000))
    drawing.maybe(0.1, "pad_to_multiple_of", 8)
    rows = options.get("rows", 6) * options.get("steps_per_generation", options.get("gradient_accumulation_steps", 1))
    groups = [size for size in (2, 3, 4, 6) if rows % size == 0]
    if rows % 3 or drawing.chance(0.3):
        options["group"] = drawing.generator.choice(groups)


def _draw_objective(drawing: Draw) -> None:
    """
    No bound is one that every on-policy token, or every drifted sequence, lies on: there clipping and masks are a
    matter of rounding.
    """
    options = drawing.options
    if drawing.chance(0.75):
        options["loss_type"], needed = drawing.generator.choice(LOSS_TYPES)
        options.update(needed)
    drawing.maybe(0.25, "importance_sampling_level", "sequence")
    drawing.maybe(0.2, "epsilon", 0.1, 0.3, 0.05)
    drawing.maybe(0.2, "epsilon_high", 0.28, 1.5, 5.0)
    drawing.maybe(0.2, "delta", 1.5, 2.0, 4.0)
    drawing.maybe(0.3, "temperature", 0.7, 1.3, 0.9)
    if drawing.maybe(0.35, "beta", 0.04, 0.1, 0.001, 1.0):
        drawing.maybe(0.3, "use_bias_correction_kl", True)
    drawing.maybe(0.15, "top_entropy_quantile", 0.2, 0.37, 0.5, 0.8)
    drawing.maybe(0.15, "off_policy_mask_threshold", 0.1, 0.05, 0.45)
    if drawing.maybe(0.12, "entropy_coef", 0.1, 0.01) and drawing.maybe(0.4, "use_adaptive_entropy", True):
        options["entropy_target"] = drawing.generator.choice((0.5, 100.0))
    if options.get("loss_type") == "sapo":
        drawing.maybe(0.5, "sapo_temperature_neg", 2.0, 0.5)
        drawing.maybe(0.5, "sapo_temperature_pos", 2.0, 0.5)
    if options.get("loss_type") == "vespo":
        drawing.maybe(0.5, "vespo_k_pos", 1.0, 3.0)
        drawing.maybe(0.5, "vespo_lambda_pos", 1.0, 4.0)
        drawing.maybe(0.5, "vespo_k_neg", 1.0, 2.0)
        drawing.maybe(0.5, "vespo_lambda_neg", 1.0, 3.0)


def _draw_batch(drawing: Draw) -> None:
    options = drawing.options
    rows, count = options.get("rows", 6), options.get("gradient_accumulation_steps", 1)
    drawing.maybe(0.6, "old", "policy", "far", "drifted")
    drawing.maybe(0.25, "ratio", "report")
    if options.get("beta"):
        options["reference"] = True
    drawing.maybe(0.25, "sampling", True)
    drawing.maybe(0.25, "tool_mask", True)
    drawing.maybe(0.15, "token_advantages", True)
    drawing.maybe(0.4, "repeated_prompts", True)
    if options.get("mode") == "log-probs":  # there must be some, and the method is called without images
        return
    drawing.some(0.15, "empty_rows", rows)
    drawing.some(0.15, "empty_micro_batches", count)
    family = FAMILIES.get(options.get("model", ""))
    if family is not None and family.images is not None:
        drawing.maybe(0.7, "images", family.images)


def _draw_rollout(drawing: Draw) -> None:
    options = drawing.options
    steps = options.get("steps_per_generation", options.get("gradient_accumulation_steps", 1))
    drawing.maybe(0.25, "scale_rewards", "batch", "none")
    if drawing.maybe(0.6, "sampling", "token", "sequence"):
        modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        count = 2 if options.get("loss_type") == "vespo" else 4  # TRL refuses its modes of sequences
        options["vllm_importance_sampling_mode"] = drawing.generator.choice(modes[:count])
        drawing.maybe(0.5, "vllm_importance_sampling_clip_max", 2.0, 1.2, 5.0)
        drawing.maybe(0.4, "vllm_importance_sampling_clip_min", 0.5, 0.9)
        drawing.maybe(0.1, "vllm_importance_sampling_correction", False)
        drawing.maybe(0.1, "nan", True)
    drawing.maybe(0.2, "env_mask", True)
    drawing.some(0.3, "truncated_rows", options.get("rows", 6) * steps)
    drawing.maybe(0.3, "mask_truncated_completions", True)
    drawing.maybe(0.2, "uneven", True)


def _draw_fused_options(drawing: Draw) -> None:
    drawing.maybe(0.3, "fused_layout", "packed", "padded", "padded")  # the second was an option of earlier cases
    if drawing.options.get("model") == "doge":  # refuses packed rows
        drawing.options.pop("fused_layout", None)
    drawing.maybe(0.25, "fused_backward", "forecast", "recompute")
    drawing.maybe(0.25, "fused_logits_mib", 0.05, 0.5)  # of one to a few chunks
    drawing.maybe(0.3, "fused_max_tokens_per_forward", 0, 60, 10_000)
    drawing.maybe(0.15, "fused_share_prompts", False)
    drawing.skip(0.15, False)  # this and the next: options of earlier cases
    drawing.skip(0.2, True, False)
    drawing.maybe(0.2, "fused_skip_old_logps", True, False)
    drawing.maybe(0.1, "fused_memory", 0.5)
    drawing.maybe(0.02, "fused_compile", True)  # takes seconds


def _draw_customisation(drawing: Draw) -> None:
    # With LoRA on the head, TRL has no output of its own for hooks to see
    if drawing.options.get("adapter") != "head" and drawing.maybe(0.15, "stepwise", *CUSTOMISATIONS):
        drawing.options.pop("fused_layout", None)  # who asks for one says that nobody sees how rows are laid out
        if drawing.options["stepwise"] == "parameter-hook-sees":
            drawing.options.pop("fused_compile", None)  # the hooks of a compiled MLP run in another order


def name_of(options: Options) -> str:
    """The name of a case with these options, as `--case` takes it."""
    return PREFIX + json.dumps(options, separators=(",", ":"))


def options_of(name: str) -> Options:
    """
    Options of the case that a name means. Of a drawn one those that this TRL lacks are left out.

    Raises:
        `ValueError`:
            When the name is neither `random:<seed>:<index>` nor `random:` and an object in JSON.
    """
    content = name.removeprefix(PREFIX)
    try:
        if content.startswith(f"{TRAINING}:"):
            seed, index = content.removeprefix(f"{TRAINING}:").split(":")
            return _without_lacking({TRAINING: True, **draw_training(int(seed), int(index))})
        if not content.startswith("{"):
            seed, index = content.split(":")
            return _without_lacking(draw(int(seed), int(index)))
        return dict(json.loads(content))
    except ValueError as error:
        raise ValueError(
            f"{name!r} is neither random:<seed>:<index>, random:{TRAINING}:<seed>:<index> nor random:<options in JSON>."
        ) from error


def _without_lacking(options: Options) -> Options:
    """Without the options of `GRPOConfig` that this TRL lacks, which would skip half of the cases of an old one."""
    lacking = _DRAWN_OF_TRL - {option.name for option in fields(GRPOConfig)}
    return {name: value for name, value in options.items() if name not in lacking}


def random_case(name: str) -> DrawnCase | Training:
    """The case that a name means, see [`options_of`]."""
    return case_of(name, options_of(name))


def case_of(name: str, options: Mapping[str, Any]) -> DrawnCase | Training:
    """
    Make a case of options.

    Args:
        name (`str`):
            Of the case.
        options (`Mapping[str, Any]`):
            As drawn, or some of them.
    """
    if TRAINING in options:
        return training_of(name, {option: value for option, value in options.items() if option != TRAINING})
    given: Options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}

    def take(*names: str) -> Options:
        return {name: given.pop(name) for name in names if name in given}

    data_class = Rollout if given.pop("rollout", False) else Batch
    rows, is_uneven = given.pop("rows", ROWS), given.pop("uneven", False)
    lengths = _lengths(given.pop("lengths", None), rows, is_uneven)
    data = data_class(lengths=lengths, **take(*(option.name for option in fields(data_class))))
    given |= {"per_device_train_batch_size": rows, "num_generations": given.pop("group", GROUP)}
    of_case = take(*_OF_CASE)
    fused = take(*(name for name in given if name.startswith("fused_") or name == "kl_estimator"))
    model = of_case.get("model", Case.model)
    if model.startswith(census.PREFIX):
        census.add(model)
    family = {**FAMILIES, **VARIANTS}.get(model)
    if trl_compat.RETURNS_AUX_LOSS:  # TRL's own default would ask models for it that have none
        given.setdefault("router_aux_loss_coef", 0.0)
    else:
        given.pop("router_aux_loss_coef", None)
    customised = CUSTOMISATIONS[given.pop("stepwise")] if "stepwise" in given else Customisation()
    return DrawnCase(
        name,
        ", ".join(f"{option}={value}" for option, value in options.items()),
        given,
        data,
        **of_case,
        frozen=family.flat if family is not None else (),
        noise=0.02 if "adapter" in of_case else 0.05,  # constant biases and norms would hide errors
        recomputed="any",
        fused=fused,
        compare_bf16=not _has_experts(model),
        compare_liger=False,
        customised=customised,
    )


def _lengths(seed: int | None, rows: int, is_uneven: bool) -> Lengths:
    """Of prompts and completions: from a seed, or those of other cases."""
    if seed is None:
        return UNEVEN_LENGTHS if is_uneven else LENGTHS
    generator = random.Random(seed)
    prompts = tuple(generator.randint(2, 9) for _ in range(rows))
    return prompts, tuple(generator.randint(1, 14) for _ in range(rows))


def _has_aux_loss(model: str) -> bool:
    return model == "moe" or (model in FAMILIES and FAMILIES[model].has_aux_loss)


def _has_experts(model: str) -> bool:
    return "moe" in model or model in ("gpt-oss", "deepseek-v3", "llama4", "mistral4", "minimax-m2", "jamba")
