"""What this package builds upon in TRL, by name, and the refusal of versions that lost some of it."""

import inspect
import warnings
from collections.abc import Mapping
from types import CodeType

import transformers
import trl
from packaging.version import Version
from trl import GRPOConfig, GRPOTrainer

from . import NEWEST_TRL, OLDEST_TRL, SUPPORTED_TRL


TRL = Version(Version(trl.__version__).base_version)
TRANSFORMERS = Version(Version(transformers.__version__).base_version)

# TRL < 1.6 bounds vLLM's importance ratio from above alone, and calls the bound the cap. Removable with TRL 1.5
SAMPLING_CLIP_MAX = "vllm_importance_sampling_cap" if Version("1.6.0") > TRL else "vllm_importance_sampling_clip_max"

# Methods of `GRPOTrainer` that this package overrides or calls
METHODS = (
    "__init__",
    "train",
    "training_step",
    "get_batch_samples",
    "compute_loss",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
    "_generate_and_score_completions",
    "_prepare_inputs",
    "_move_model_to_device",
)
# What a `GRPOTrainer` sets when it is made, by the TRL from which on it does
ATTRIBUTES = {
    "0.27.2": (
        *("_metrics", "_step", "_buffered_inputs", "_tag_names", "current_gradient_accumulation_steps"),
        *("accelerator", "args", "model", "ref_model", "loss_type", "importance_sampling_level", "num_iterations"),
        *("epsilon_low", "epsilon_high", "beta", "temperature", "max_completion_length", "top_entropy_quantile"),
        *("off_policy_mask_threshold", "use_vllm", "vllm_importance_sampling_correction"),
        *("vllm_importance_sampling_mode", "tools", SAMPLING_CLIP_MAX),
    ),
    "1.6.0": ("vllm_importance_sampling_clip_min",),
    "1.7.0": ("aux_loss_enabled", "router_aux_loss_coef"),
    "1.8.0": ("_entropy_bonus_enabled", "entropy_coef", "use_adaptive_entropy", "_last_world_entropy"),
}
# What an `RLOOTrainer` must have beside the methods
RLOO_ATTRIBUTES = (
    *("_metrics", "_step", "_buffered_inputs", "current_gradient_accumulation_steps", "accelerator", "args", "model"),
    *("ref_model", "num_iterations", "epsilon_low", "epsilon_high", "beta", "temperature", "use_vllm"),
)
OPTIONS = {
    "0.27.2": (
        *("use_liger_kernel", "liger_kernel_config", "cast_lm_head_to_fp32", "gradient_accumulation_steps"),
        *("steps_per_generation", "delta", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg"),
    ),
    "1.4.0": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    "1.8.0": ("entropy_target",),
}


def check_trl(trainer_class: type = GRPOTrainer, version: Version = TRL) -> None:
    """
    Refuse a TRL, or a library below it, that this package cannot extend; warn once about a TRL that it was not tested
    with.
    """
    missing = _missing(trainer_class, version)
    if version < OLDEST_TRL or missing:
        gone = f" with these libraries ({'; '.join(missing)})" if missing else ""
        raise ImportError(f"trl_fused_grpo cannot extend TRL {version}{gone}; install {SUPPORTED_TRL}.")
    if version > NEWEST_TRL:
        warnings.warn(
            f"trl_fused_grpo was tested with {SUPPORTED_TRL}, and TRL {version} is newer: run `trl-fused-grpo parity` "
            "before you rely on it.",
            stacklevel=2,
        )


def _missing(trainer_class: type, version: Version) -> list[str]:
    """Names that the libraries have lost, in words."""

    def expected(names: Mapping[str, tuple[str, ...]]) -> list[str]:
        return [name for since, group in names.items() if Version(since) <= version for name in group]

    used = _names_used(trainer_class)
    gone = {
        "GRPOTrainer": [name for name in METHODS if not hasattr(trainer_class, name)]
        # A trainer sets its attributes when it is made: here its code is asked whether it knows them
        + [name for name in expected(ATTRIBUTES) if used and name not in used],
        "trl": [name for name in ("RLOOTrainer", "RLOOConfig") if not hasattr(trl, name)],
        "GRPOConfig": [name for name in expected(OPTIONS) if name not in GRPOConfig.__dataclass_fields__],
    }
    if not gone["trl"]:
        known = _names_used(trl.RLOOTrainer)
        gone["RLOOTrainer"] = [
            name for name in (*METHODS, *RLOO_ATTRIBUTES) if not hasattr(trl.RLOOTrainer, name) and name not in known
        ]
    return [f"{owner} has no {', '.join(names)}" for owner, names in gone.items() if names]


def _names_used(trainer_class: type) -> set[str]:
    """Every name in the code of a trainer's own classes, those of transformers left out."""
    used: set[str] = set()
    for cls in trainer_class.__mro__:
        if not cls.__module__.startswith(("transformers.", "builtins")):
            used.update(vars(cls))
            methods = [inspect.unwrap(m) for m in vars(cls).values() if callable(m) and not isinstance(m, type)]
            used.update(*(names_in(method.__code__) for method in methods if hasattr(method, "__code__")))
    return used


def names_in(code: CodeType) -> set[str]:
    """The names that a code, and the functions inside it, use."""
    return {*code.co_names}.union(*(names_in(part) for part in code.co_consts if isinstance(part, CodeType)))


check_trl()  # before anything else of the package looks at what may be gone
