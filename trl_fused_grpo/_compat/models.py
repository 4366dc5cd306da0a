"""
What depends on the version of transformers or PEFT, and their private names: what a model's attention, positions and
adapters make of rows. `architecture.py` has what a model is made of. Each entry says what differs, since when or until
when; it can be removed when the oldest supported version has passed that.
"""

import functools
import inspect
from typing import Any

from packaging.version import Version
from torch import nn
from transformers import GenerationMixin, PreTrainedModel, masking_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer as GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .architecture import TRANSFORMERS_4
from .libraries import is_library_function
from .required import TRANSFORMERS as TRANSFORMERS
from .required import names_in
from .torch import modules_of


# transformers < 5.21: the state of Zamba2 and Nemotron-H depends on which tokens lie in one chunk of columns (5.13 is
# known to, 5.21 not to; what lies between is laid out like the former)
_CHUNKS_MATTER = Version("5.21.0") > TRANSFORMERS

# Families whose own forward depends on where the padding is: OPT counts positions from the mask, RecurrentGemma lets
# padding into its state; so does LFM2 before transformers 5, where Phi-MoE makes rotary tables for as many positions as
# there are columns, and GLM-4V fails without a mask. Ministral 3's queries grow with the column, not with the position
# (transformers < 5.8)
PADDING_MATTERS = {
    *("opt", "recurrent_gemma"),
    *(("lfm2", "phimoe", "glm4v_text", "glm4v_moe_text", "Glm4vMoe_text") if TRANSFORMERS_4 else ()),
    *(("zamba2", "nemotron_h") if _CHUNKS_MATTER else ()),
    *(("ministral3",) if Version("5.8.0") > TRANSFORMERS else ()),
}


def may_evaluate(module: nn.Module) -> bool:
    """
    Return `True` if a module can go to evaluation and back. On a CPU with AVX512-BF16 bitsandbytes (seen with 0.50)
    packs the weight of a linear layer in four bits that is called in evaluation, for inference alone: back in training
    the gradient of its input is missing. The layer itself draws no random numbers.
    """
    return type(module).__module__.partition(".")[0] != "bitsandbytes"


def attention_implementation(config: Any) -> str:
    """The name of a model's attention, under which transformers has it in its table."""
    return config._attn_implementation


def head_widths(config: Any) -> list[int]:
    """The widths of the attention heads of a text model, by its configuration; the narrowest first."""
    # Gemma 4: newer transformers refuse to name one width where layers have several, earlier ones name both
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    widths = set()
    for layer in layers:
        names = ("qk_head_dim", "head_dim")  # of latent attention the latter is a part alone
        known = next(filter(None, (getattr(layer, name, None) for name in names)), None)
        widths.add(known or layer.hidden_size // (getattr(layer, "num_attention_heads", None) or 1))
    return sorted({*widths, *filter(None, [getattr(config, "global_head_dim", None)])})


# Files of torch and transformers with functions that models call, beside their own
FILES = (
    *("torch", "torch.nn.functional", "transformers.activations", "transformers.masking_utils"),
    *("transformers.modeling_layers", "transformers.modeling_rope_utils", "transformers.pytorch_utils"),
    *(f"transformers.integrations.{name}" for name in ("sdpa_attention", "flash_attention", "flex_attention")),
)


# Methods with which a model generates; none of them runs in a forward for log-probs
GENERATION_METHODS = frozenset(vars(GenerationMixin)) - {"__doc__", "__module__", "__dict__", "__weakref__"}


def foreign_attention(config: Any) -> str | None:
    """The attention or mask function registered for a model that is not a library's, in words, or `None`."""
    name = attention_implementation(config)
    for kind, table in (("attention", ALL_ATTENTION_FUNCTIONS), ("mask", ALL_MASK_ATTENTION_FUNCTIONS)):
        function: Any = table.get(name)
        if function is not None and not is_library_function(function):
            return f"the {kind} function registered as {name!r}"
    return None


# The name under which a modeling file of transformers has the attention of models that load as `"eager"`; its layers
# look it up when they are called, also where they give it to transformers' table as the default
EAGER_ATTENTION = "eager_attention_forward"


def flash_implementations() -> list[str]:
    """The names under which transformers' function for FlashAttention stands in its table, kernels of the Hub too."""

    def is_flash(function: Any) -> bool:
        function = inspect.unwrap(function)
        # transformers < 5 registers a kernel of the Hub as a `functools.partial`
        return getattr(function, "func", function) is flash_attention_forward

    return [name for name, function in ALL_ATTENTION_FUNCTIONS.items() if is_flash(function)]


def is_stateful(causal_lm: PreTrainedModel) -> bool:
    """Return `True` if a model says that its layers carry a state from token to token."""
    return causal_lm._is_stateful


# From 5.0 on transformers hooks the input embeddings whenever checkpointing is switched on, which TRL does after each
# generation: thousands of hooks in the end that all do the same, in stock too
_HOOK_MAKER = f"{PreTrainedModel.enable_input_require_grads.__qualname__}.<locals>."


def forget_repeated_hooks(model: nn.Module) -> None:
    """Remove all of these hooks but the last one of each module."""
    for module in modules_of(model):
        hooks = module._forward_hooks
        if not hooks:
            continue
        repeated = [key for key, hook in hooks.items() if getattr(hook, "__qualname__", "").startswith(_HOOK_MAKER)]
        for key in repeated[:-1]:
            del hooks[key]


# The attribute of a layer of transformers with the function that checkpoints it, once checkpointing is enabled
CHECKPOINT_FUNCTION = "_gradient_checkpointing_func"


def is_peft_model(model: nn.Module) -> bool:
    """Return `True` if `model` is wrapped by PEFT, which need not be installed."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def causal_lm_of(model: Any) -> Any:
    """The causal language model inside wrappers of PEFT, DDP, DeepSpeed and `torch.compile`, or the model itself."""
    while not hasattr(type(model), "get_output_embeddings"):
        if is_peft_model(model):
            model = model.get_base_model()  # PEFT 0.17: of Poly the tuner, whose `model` it is
        else:
            model = getattr(model, "_orig_mod", None) or getattr(model, "module", None) or model.model
    return model


def is_prompt_learning(model: nn.Module) -> bool:
    """Return `True` if PEFT puts virtual tokens before each row."""
    config: Any = getattr(model, "active_peft_config", None)
    return is_peft_model(model) and bool(config.is_prompt_learning)


# PEFT methods under which a token's result depends on that token alone. Others read whole rows (virtual tokens, tasks,
# means over a batch: Lily's router, X-LoRA's scalings), and so may those that are newer than this list
TOKENWISE_PEFT = {
    *("LORA", "ADALORA", "BOFT", "C3A", "DELORA", "FOURIERFT", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA"),
    *("LOKR", "MISS", "BONE", "OFT", "OSF", "PSOFT", "RANDLORA", "ROAD", "SHIRA", "TINYLORA", "TRAINABLE_TOKENS"),
    *("UNILORA", "VBLORA", "VERA", "WAVEFT"),
}
# Options of LoRA that read whole rows: an invocation that is looked for in each, a mean over the first batch
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


def _option(module: nn.Module, name: str) -> Any:
    """An attribute of a module or of its class, or `None`; the module would take long to say that it has none."""
    own = vars(module)
    return own[name] if name in own else getattr(type(module), name, None)


def noise_of(module: nn.Module) -> str | None:
    """The noise that a module adds without an option for it, in words, or `None`."""
    if _option(module, "neftune_noise_alpha"):
        return "NEFTune's noise"
    # PhiMoE's router samples experts in training, whatever its jitter is
    samples = module.training and _option(module, "router_jitter_noise") is not None
    return "the sampling of its router" if samples else None


def neftune_noise(causal_lm: PreTrainedModel) -> float | None:
    """NEFTune's factor while it adds noise to the input embeddings, else `None`: Trainer leaves it at the module."""
    embeddings: Any = causal_lm.get_input_embeddings()
    return getattr(embeddings, "neftune_noise_alpha", None) if embeddings.training else None


def rope_follows_length(module: nn.Module) -> bool:
    """
    Return `True` if a rotary embedding's factors depend on the longest position; `dynamic_rope_update` asks the same.
    """
    rope_type: Any = getattr(module, "rope_type", None)
    types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]  # transformers >= 5: one a layer type
    if type(module).__name__ == "PhimoeRotaryEmbedding":  # scales by the longest position whatever else its type is
        return rope_type != "default"
    return any(isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in types)


def is_transformers_own(function: Any) -> bool:
    """Return `True` if transformers defined a function; `functools.wraps` would give any other its name and module."""
    function = getattr(function, "func", function)  # of a `functools.partial`
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("transformers.")


@functools.cache
def writes_weights(cls: type) -> bool:
    """Return `True` if a module of transformers writes to its weights behind autograd's back, as Gemma 3n's clamp."""
    methods = [method for method in vars(cls).values() if hasattr(method, "__code__") and is_transformers_own(method)]
    return any("data" in names_in(method.__code__) for method in methods)


# What transformers' attention through SDPA takes after the mask, beside dropout, scale and causality: from
# transformers 5 on (`position_bias`, a paged cache)
FURTHER_SDPA_ARGUMENTS = [
    name
    for name, argument in list(inspect.signature(sdpa_attention_forward).parameters.items())[5:]
    if argument.kind is not argument.VAR_KEYWORD and name not in ("dropout", "scaling", "is_causal")
]

# Whether transformers' attention through SDPA refuses soft-capped scores; before transformers 5.14 or so it leaves out
# the cap without a word
SDPA_REFUSES_SOFTCAP = "softcap" in sdpa_attention_forward.__code__.co_consts


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


def _made_with(mask_function: Any) -> dict[str, Any]:
    """The free variables of a mask function of transformers."""
    code = getattr(mask_function, "__code__", None)
    if code is None or not code.co_freevars:
        return {}
    cells = (cell.cell_contents for cell in mask_function.__closure__)
    return dict(zip(code.co_freevars, cells, strict=True))


def within_one_sequence(mask_function: Any) -> Any:
    """
    A mask function without what transformers adds where positions begin anew: that sequences do not see each other, and
    (transformers >= 5.22) that places are counted from the beginning of each. It is right within each sequence alone.
    """
    kind, made_with = _MASK_CODES.get(getattr(mask_function, "__code__", None)), _made_with(mask_function)
    if kind == "remapped":
        return within_one_sequence(made_with["mask_function"])
    if kind != "and":
        return mask_function
    parts = [part for part in made_with["mask_functions"] if _MASK_CODES.get(part.__code__) != "sequences"]
    return masking_utils.and_masks(*map(within_one_sequence, parts))


def mask_parts(mask_function: Any) -> list[tuple[str, Any]]:
    """
    What a mask function of transformers is the intersection of.

    Returns:
        `list[tuple[str, Any]]`:
            `("causal", None)`, `("window", tokens)`, `("chunk", tokens)`, `("sequences", None)`, `("padding", None)`;
            anything else as `("unknown", name)`.
    """
    kind = _MASK_CODES.get(getattr(mask_function, "__code__", None), "unknown")
    made_with = _made_with(mask_function)
    if kind == "and":
        return [part for function in made_with["mask_functions"] for part in mask_parts(function)]
    if kind == "remapped":
        return mask_parts(made_with["mask_function"])
    if kind == "unknown":
        return [(kind, getattr(mask_function, "__qualname__", repr(mask_function)))]
    return [(kind, made_with.get("sliding_window", made_with.get("chunk_size")))]
