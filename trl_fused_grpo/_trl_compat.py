"""
Everything that depends on the version of TRL, transformers or accelerate. Each entry says what, since when and until
when.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
import transformers
import trl
from accelerate import Accelerator
from accelerate.utils import fsdp_utils
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from trl.extras.profiling import profiling_decorator as profiling_decorator
from trl.trainer.utils import use_adapter

from .sampling import SamplingCorrection


logger = logging.get_logger(__name__)

OLDEST_TRL, NEWEST_TRL = Version("0.27.2"), Version("1.16.0")
TRL = Version(Version(trl.__version__).base_version)
TRANSFORMERS = Version(Version(transformers.__version__).base_version)

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


def check_host(trainer_class: type = GRPOTrainer, version: Version = TRL) -> None:
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


check_host()  # before anything below looks at what may be gone


# TRL >= 1.7: the seam returns the auxiliary loss of Mixture-of-Experts models as a third value
SEAM_RETURNS_AUX_LOSS = (
    "compute_aux_loss" in inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
)


_GENERATION_CODE = inspect.unwrap(GRPOTrainer._generate_and_score_completions).__code__
_BETWEEN_HOST_AND_SEAM = {__name__, f"{__package__}.trainer", f"{__package__}.deferral", profiling_decorator.__module__}


def is_asked_by_generation() -> bool:
    """Whether a call of the seam comes from the host's generation itself, not from what that calls of the user's."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN_HOST_AND_SEAM:
        frame = frame.f_back
    return frame is not None and frame.f_code is _GENERATION_CODE


def seam_result(logps: Tensor, entropies: Tensor | None, aux_loss: Tensor | None) -> tuple[Tensor | None, ...]:
    """What the host expects of its `_get_per_token_logps_and_entropies`."""
    return (logps, entropies, aux_loss) if SEAM_RETURNS_AUX_LOSS else (logps, entropies)


# TRL >= 1.15: the host has a fused head of its own, whose entropies always carry a gradient
_HAS_FUSED_HEAD = hasattr(trl.trainer.utils, "add_fused_lm_head")
# With it, it takes every family's auxiliary loss from Mixtral's function, before from the model's own forward
AUX_LOSS_IS_MIXTRALS = _HAS_FUSED_HEAD


def host_entropies(trainer: GRPOTrainer, entropies: Tensor | None) -> Tensor | None:
    """
    Entropies with a gradient where the host's have one: from TRL 1.15 on always, from 1.8 on with an entropy bonus,
    before never.
    """
    carry = _HAS_FUSED_HEAD or getattr(trainer, "_entropy_bonus_enabled", False)
    return entropies if entropies is None or carry else entropies.detach()


# The methods that TRL's `_compute_loss` calls, by the version
OBJECTIVE_METHODS = tuple(
    name
    for name in inspect.unwrap(GRPOTrainer._compute_loss).__code__.co_names
    if name != "_get_per_token_logps_and_entropies" and inspect.isfunction(getattr(GRPOTrainer, name, None))
)

# TRL < 1.15: log-probs come from the logits of the model's own forward, those of padding too; later they are zero there
SCORES_THROUGH_LOGITS = not AUX_LOSS_IS_MIXTRALS

# TRL >= 1.9: `num_items_in_batch` is rescaled from the generation batch to one accumulation window
_RESCALES_NUM_ITEMS = Version("1.9.0") <= TRL
# TRL 1.8 and 1.9: the entropy bonus of DAPO, CISPO and VESPO shares the policy term's normalizer
_ENTROPY_SHARES_NORMALIZER = Version("1.8.0") <= TRL < Version("1.10.0")
# TRL < 1.10: LUSPO averages over padding too wherever its per-token loss is [B, T]
LUSPO_COUNTS_PADDING = Version("1.10.0") > TRL
# TRL >= 1.11: a token that the sampler could not score (NaN) gets importance ratio one
UNSCORED_IS_ONE = Version("1.11.0") <= TRL
# TRL < 0.29: the tool mask counts only where the trainer has tools
_TOOL_MASK_NEEDS_TOOLS = Version("0.29.0") > TRL
# transformers < 5: vision-language models keep their language backbone in `model`, and Trainer applies Liger's layer
# kernels in its constructor rather than when training starts
_TRANSFORMERS_4 = Version("5.0.0") > TRANSFORMERS

# Families whose own forward depends on where the padding is: OPT counts positions from the mask, RecurrentGemma lets
# padding into its state; so do LFM2 and Zamba2 before transformers 5
PADDING_MATTERS = {"opt", "recurrent_gemma", *(("lfm2", "zamba2") if _TRANSFORMERS_4 else ())}

# accelerate before its pull request 3630 (2025): every backward steps DeepSpeed's engine, which counts them
DEEPSPEED_STEPS_WITH_BACKWARD = "sync_gradients" not in inspect.signature(DeepSpeedEngineWrapper.backward).parameters


# accelerate >= 1.14 has FSDP2 shard embedding and head apart, and torch >= 2.13 refuses a weight that both have
FSDP2_FORBIDS_TIES_OF_HEADS = hasattr(fsdp_utils, "_find_final_norm") and Version(torch.__version__).release >= (2, 13)


def loss_mask(trainer: GRPOTrainer, inputs: dict[str, Any]) -> Tensor:
    """The positions that count in the loss `[B, T]`."""
    if "tool_mask" not in inputs or (_TOOL_MASK_NEEDS_TOOLS and not trainer.tools):
        return inputs["completion_mask"]
    return inputs["completion_mask"] * inputs["tool_mask"]


def temperature_of(trainer: GRPOTrainer) -> float:
    """Temperature of the log-probs: TRL >= 1.15 gives it to the head when the trainer is made."""
    return trainer.temperature if SCORES_THROUGH_LOGITS else trainer.args.temperature


def window_normalizer(trainer: GRPOTrainer, inputs: dict[str, Any]) -> Tensor:
    """Tokens of one accumulation window per process: what DAPO, CISPO and VESPO divide by; a scalar tensor."""
    args: Any = trainer.args
    normalizer = inputs["num_items_in_batch"] / trainer.accelerator.num_processes
    if _RESCALES_NUM_ITEMS:
        normalizer = normalizer * trainer.current_gradient_accumulation_steps / args.steps_per_generation
    return normalizer


def entropy_normalizer(trainer: GRPOTrainer, mask: Tensor, window: Tensor | float) -> Tensor | float:
    """What the sum of entropies is divided by in the entropy bonus."""
    if _ENTROPY_SHARES_NORMALIZER and trainer.loss_type in ("dapo", "cispo", "vespo"):
        return window
    return mask.sum().clamp(min=1.0) * trainer.current_gradient_accumulation_steps


def backbone(causal_lm: PreTrainedModel) -> nn.Module:
    """
    The part of a causal language model that ends in hidden states.

    Raises:
        `ValueError`: when the model names none.
    """
    is_composite = causal_lm.config.get_text_config() is not causal_lm.config
    module = causal_lm.model if _TRANSFORMERS_4 and is_composite else causal_lm.base_model
    if module is causal_lm:  # Llama 4, and Gemma 3 before transformers 5, name a prefix that they do not have
        module = getattr(causal_lm, "model", causal_lm)
    if module is causal_lm:
        raise ValueError(
            f"{type(causal_lm).__name__} does not name its backbone (base_model_prefix), so its head cannot be run "
            "apart: train with use_liger_loss=False."
        )
    return module


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is wrapped by PEFT, which need not be installed."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def without_adapter(model: Any) -> Any:
    """The model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if is_peft_model(model) else model


def is_prompt_learning(model: nn.Module) -> bool:
    """Whether PEFT puts virtual tokens before each row."""
    config: Any = getattr(model, "active_peft_config", None)
    return is_peft_model(model) and bool(config.is_prompt_learning)


def sampling_correction(trainer: GRPOTrainer) -> SamplingCorrection:
    """The trainer's vLLM importance-sampling correction."""
    # TRL < 1.5: one upper bound, called the cap
    cap = getattr(trainer, "vllm_importance_sampling_cap", None)
    return SamplingCorrection(
        mode=trainer.vllm_importance_sampling_mode,
        clip_min=getattr(trainer, "vllm_importance_sampling_clip_min", None),
        clip_max=getattr(trainer, "vllm_importance_sampling_clip_max", cap),
        unscored_is_one=UNSCORED_IS_ONE,
    )


@contextmanager
def liger_flag_lowered(args: GRPOConfig) -> Generator[None, None, None]:
    """
    Hide `use_liger_kernel` from the host's constructor.

    Up to TRL 1.14 it selects the host's own Liger loss, with guards against combinations that are supported here; from
    1.15 on it is deprecated. The layer kernels that it stands for too are applied afterwards.
    """
    wanted, args.use_liger_kernel = args.use_liger_kernel, False
    try:
        yield
    finally:
        args.use_liger_kernel = wanted


# TRL >= 1.15: a PEFT adapter on the output projection is refused
REFUSES_ADAPTER_ON_HEAD = hasattr(sys.modules[GRPOTrainer.__module__], "BaseTunerLayer")


@contextmanager
def adapter_on_head_allowed() -> Generator[None, None, None]:
    """
    Lift the host's refusal of a PEFT adapter on the output projection (TRL >= 1.15): its own log-probabilities would
    leave the adapter out, ours do not.
    """
    if not REFUSES_ADAPTER_ON_HEAD:
        yield
        return
    host: Any = sys.modules[GRPOTrainer.__module__]
    tuner_layer = host.BaseTunerLayer
    host.BaseTunerLayer = ()  # nothing is an instance of it
    try:
        yield
    finally:
        host.BaseTunerLayer = tuner_layer


def apply_liger_layer_kernels(model: PreTrainedModel, args: GRPOConfig) -> None:
    """Replace the model's layers by Liger's, but not its forward, now or when training starts."""
    config = {**(args.liger_kernel_config or {}), "fused_linear_cross_entropy": False, "cross_entropy": False}
    args.liger_kernel_config = config
    if _TRANSFORMERS_4:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, **config)


def leave_layers(args: Any) -> None:
    """Train with the fused loss alone where `use_liger_kernel` asks for layer kernels that cannot run. Told once."""
    logger.warning_once(
        "use_liger_kernel=True: the loss is fused, but the model's layers stay as they are, because Liger's kernels "
        "for them need a GPU."
    )
    args.use_liger_loss, args.use_liger_kernel = True, False


class _HostCallError(Exception):
    def __init__(self, model_inputs: dict[str, Any]):
        self.model_inputs = model_inputs


def host_model_inputs(
    host_seam: Callable, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, multimodal: dict[str, Any]
) -> dict[str, Any]:
    """
    The keyword arguments with which the host would call a multimodal model. Each version selects images in its own way,
    so its own method is run up to that call.
    """

    def model(**model_inputs):
        raise _HostCallError(model_inputs)

    try:
        host_seam(model, input_ids, attention_mask, logits_to_keep, **multimodal)
    except _HostCallError as call:
        not_the_backbones = ("labels", "logits_to_keep", "fused_lm_head", "use_cache")
        return {name: value for name, value in call.model_inputs.items() if name not in not_the_backbones}
    raise RuntimeError("the host computed log-probabilities without calling the model")


def _tuner_layer(model: nn.Module) -> Any:
    """The first layer of a model that PEFT adapts, or `None`."""
    # Transformers' models have methods of this name
    return next((m for m in model.modules() if isinstance(getattr(m, "disable_adapters", None), bool)), None)


def adapter_state(model: nn.Module) -> tuple[bool, tuple[str, ...]] | None:
    """Whether PEFT's adapters are switched off, and which are active otherwise; `None` without adapters."""
    layer = _tuner_layer(model)
    return None if layer is None else (bool(layer.disable_adapters), tuple(layer.active_adapters))


@contextmanager
def adapters_as(model: nn.Module, state: tuple[bool, tuple[str, ...]] | None) -> Generator[None, None, None]:
    """While it lasts, a model's adapters are as [`adapter_state`] has found them at another time."""
    if state is None or state == adapter_state(model):
        yield
        return
    disabled, active = state
    peft_model: Any = next(module for module in model.modules() if is_peft_model(module))
    with use_adapter(peft_model, None if disabled else active[0]):
        yield


# PEFT methods that change what a module makes of each token by itself. Others read rows (virtual tokens, tasks, means
# over a batch: Lily's router, X-LoRA's scalings), and so may those that are newer than this list
TOKENWISE_PEFT = {
    *("LORA", "ADALORA", "BOFT", "C3A", "DELORA", "FOURIERFT", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA"),
    *("LOKR", "MISS", "BONE", "OFT", "OSF", "PSOFT", "RANDLORA", "ROAD", "SHIRA", "TINYLORA", "TRAINABLE_TOKENS"),
    *("UNILORA", "VBLORA", "VERA", "WAVEFT"),
}
# Options of LoRA that read rows: an invocation that is looked for in each, a mean over the first batch
_LORA_THAT_READS_ROWS = ("alora_invocation_tokens", "velora_config")


def why_adapter_reads_rows(model: Any) -> str | None:
    """Why a PEFT adapter of a model depends on how the rows are laid out, or `None`. Every loaded adapter counts."""
    if is_prompt_learning(model):
        return "a prompt-learning adapter puts virtual tokens before the row"
    for config in getattr(model, "peft_config", {}).values():
        name = getattr(config.peft_type, "value", config.peft_type)
        if name not in TOKENWISE_PEFT:
            return f"its adapter's method ({name}) may read whole rows"
        for option in _LORA_THAT_READS_ROWS:
            if getattr(config, option, None):
                return f"its adapter reads whole rows ({option})"
    return None


def neftune_noise(causal_lm: PreTrainedModel) -> float | None:
    """NEFTune's factor while it adds noise to the input embeddings, else `None`: Trainer leaves it at the module."""
    embeddings: Any = causal_lm.get_input_embeddings()
    return getattr(embeddings, "neftune_noise_alpha", None) if embeddings.training else None


def rope_follows_length(module: nn.Module) -> bool:
    """Whether a rotary embedding's factors depend on the longest position: `dynamic_rope_update` asks for the same."""
    rope_type: Any = getattr(module, "rope_type", None)
    types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]  # transformers >= 5: one a layer type
    if type(module).__name__ == "PhimoeRotaryEmbedding":  # scales by the longest position whatever else its type is
        return rope_type != "default"
    return any(isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in types)


def is_transformers_own(function: Any) -> bool:
    """Whether transformers defined a function; `functools.wraps` would give any other its name and module."""
    function = getattr(function, "func", function)  # of a `functools.partial`
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("transformers.")


# What transformers' attention through SDPA may be called with by position, after the mask. Those that say more than
# dropout, scale and causality came with transformers 5 (`position_bias`, a paged cache)
SDPA_ARGUMENTS = [
    name
    for name, argument in list(inspect.signature(sdpa_attention_forward).parameters.items())[5:]
    if argument.kind is not argument.VAR_KEYWORD
]


def _mask_codes() -> dict[Any, str]:
    masks: Any = masking_utils  # whatever they are made with, their code is the same
    functions: dict[str, Any] = {
        "and": masks.and_masks(masks.causal_mask_function),
        "causal": masks.causal_mask_function,
        "window": masks.sliding_window_overlay(1),
        "sequences": masks.packed_sequence_mask_function(None),
        "padding": masks.padding_mask_function(None),
        "chunk": masks.chunked_overlay(1, None),
    }
    if hasattr(masks, "remap_positions_for_packed_sequence"):  # transformers >= 5.22
        functions["remapped"] = masks.remap_positions_for_packed_sequence(masks.causal_mask_function, None)
    return {function.__code__: kind for kind, function in functions.items()}


_MASK_CODES = _mask_codes()


def mask_parts(mask_function: Any) -> list[tuple[str, Any]]:
    """
    What a mask function of transformers is the intersection of.

    Returns:
        `list[tuple[str, Any]]`:
            `("causal", None)`, `("window", tokens)`, `("chunk", tokens)`, `("sequences", None)`, `("padding", None)`;
            anything else as `("unknown", name)`.
    """
    code = getattr(mask_function, "__code__", None)
    kind = _MASK_CODES.get(code, "unknown")
    made_with = {}
    if code is not None and code.co_freevars:
        cells = (cell.cell_contents for cell in mask_function.__closure__)
        made_with = dict(zip(code.co_freevars, cells, strict=True))
    if kind == "and":
        return [part for function in made_with["mask_functions"] for part in mask_parts(function)]
    if kind == "remapped":
        return mask_parts(made_with["mask_function"])
    if kind == "unknown":
        return [(kind, getattr(mask_function, "__qualname__", repr(mask_function)))]
    return [(kind, made_with.get("sliding_window", made_with.get("chunk_size")))]


if _TRANSFORMERS_4:  # Phi-MoE makes rotary tables for as many positions as there are columns
    PADDING_MATTERS.add("phimoe")
