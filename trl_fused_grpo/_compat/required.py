"""What this package builds upon in TRL and accelerate, by name, and the refusal of a TRL that lost some of it."""

import inspect
import warnings
from collections.abc import Mapping
from types import CodeType

import trl
from accelerate import Accelerator
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from packaging.version import Version
from trl import GRPOConfig, GRPOTrainer


OLDEST_TRL, NEWEST_TRL = Version("0.27.2"), Version("1.16.0")
TRL = Version(Version(trl.__version__).base_version)

# Names that this package overrides, calls or reads of its hosts, by the TRL from which on they are there
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
)
ATTRIBUTES = {
    "0.27.2": (
        *("_metrics", "_step", "_buffered_inputs", "_tag_names", "current_gradient_accumulation_steps"),
        *("accelerator", "args", "model", "ref_model", "loss_type", "importance_sampling_level", "num_iterations"),
        *("epsilon_low", "epsilon_high", "beta", "temperature", "max_completion_length", "top_entropy_quantile"),
        *("off_policy_mask_threshold", "use_vllm", "vllm_importance_sampling_correction"),
        *("vllm_importance_sampling_mode", "tools"),
    ),
    "1.8.0": (
        *("aux_loss_enabled", "router_aux_loss_coef", "_entropy_bonus_enabled", "entropy_coef"),
        *("use_adaptive_entropy", "_last_world_entropy"),
        *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
    ),
}
OPTIONS = {
    "0.27.2": (
        *("use_liger_kernel", "liger_kernel_config", "cast_lm_head_to_fp32", "gradient_accumulation_steps"),
        *("steps_per_generation", "delta", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg"),
    ),
    "1.4.0": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    "1.8.0": ("entropy_target",),
}
ACCELERATOR = ("autocast", "backward", "gather", "reduce", "unwrap_model", "num_processes", "sync_gradients", "device")


def check_trl(trainer_class: type = GRPOTrainer, version: Version = TRL) -> None:
    """
    Refuse a TRL that this package cannot extend; warn once about one it was not tested with.

    Raises:
        `ImportError`: when TRL is too old or something that the fused trainer builds upon is gone; it is named.
    """
    supported = f"trl>={OLDEST_TRL},<={NEWEST_TRL}"
    missing = _missing(trainer_class, version)
    if version < OLDEST_TRL or missing:
        gone = f" ({'; '.join(missing)})" if missing else ""
        raise ImportError(f"trl_fused_grpo cannot extend TRL {version}{gone}; install {supported}.")
    if version > NEWEST_TRL:
        warnings.warn(
            f"trl_fused_grpo was tested with {supported}, and TRL {version} is newer: run `trl-fused-grpo parity` "
            "before you rely on it.",
            stacklevel=2,
        )


def _missing(trainer_class: type, version: Version) -> list[str]:
    """What is gone of the hosts, in words."""

    def expected(names: Mapping[str, tuple[str, ...]]) -> list[str]:
        return [name for since, group in names.items() if Version(since) <= version for name in group]

    used = _names_used(trainer_class)
    gone = {
        "GRPOTrainer": [name for name in METHODS if not hasattr(trainer_class, name)]
        # A trainer sets its attributes when it is made: here its code is asked whether it knows them
        + [name for name in expected(ATTRIBUTES) if used and name not in used],
        "GRPOConfig": [name for name in expected(OPTIONS) if name not in GRPOConfig.__dataclass_fields__],
        "Accelerator": [name for name in ACCELERATOR if not hasattr(Accelerator, name)],
        "DeepSpeedEngineWrapper": [] if hasattr(DeepSpeedEngineWrapper, "backward") else ["backward"],
    }
    return [f"its {owner} has no {', '.join(names)}" for owner, names in gone.items() if names]


def _names_used(trainer_class: type) -> set[str]:
    """Every name in the code of a trainer's own classes, those of transformers left out."""
    used: set[str] = set()
    for cls in trainer_class.__mro__:
        if not cls.__module__.startswith(("transformers.", "builtins")):
            used.update(vars(cls))
            methods = [inspect.unwrap(m) for m in vars(cls).values() if callable(m) and not isinstance(m, type)]
            waiting = [m.__code__ for m in methods if hasattr(m, "__code__")]
            while waiting:
                code = waiting.pop()
                used.update(code.co_names)
                waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return used
