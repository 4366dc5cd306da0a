"""
The options: `use_liger_loss` for TRL's `GRPOConfig` and `RLOOConfig` on every version, `FusedGRPOConfig` with the
further ones, and `FusedOptions`, in which the trainer reads them.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl import GRPOConfig, RLOOConfig
from typing_extensions import Self

from ._compat.dataclass_fields import add_field
from .loss.objective import KL_ESTIMATORS


_FIELD = "use_liger_loss"
_HELP = "Whether the fused trainer computes the loss through the fused linear function, at parity with TRL's own path."


def _keep_flag_through_post_init(cls: Any) -> None:
    """Hide `use_liger_loss` from TRL's `__post_init__`, which would act on it."""
    original = cls.__post_init__

    @functools.wraps(original)
    def post_init(self):
        # TRL 0.27 warns about the field, turns `use_liger_kernel` on for it and then refuses `delta`
        fused, kernel = self.use_liger_loss, self.use_liger_kernel
        self.use_liger_loss = None
        if fused:
            self.use_liger_kernel = False
        original(self)
        self.use_liger_loss, self.use_liger_kernel = fused, kernel

    cls.__post_init__ = post_init


def install_use_liger_loss(cls: Any = GRPOConfig) -> None:
    """
    Make `use_liger_loss` a dataclass field of a class of TRL's arguments. Its default, `None`, says nothing: the fused
    loss is off unless `patch()` switches it on. The class itself is changed, so that it does not matter how or when it
    was imported. Argument parsers, `to_dict` and saved arguments see the field. Idempotent.
    """
    if getattr(cls, "_has_fused_loss", False):
        return
    # `bool` as in TRL 0.27, which has the field: of `bool | None` a parser does not take `--use_liger_loss` alone
    add_field(cls, _FIELD, bool, field(default=None, metadata={"help": _HELP}))
    _keep_flag_through_post_init(cls)
    cls._has_fused_loss = True


install_use_liger_loss()
install_use_liger_loss(RLOOConfig)


LAYOUTS = ("auto", "packed", "padded")
BACKWARD_MODES = ("auto", "forecast", "recompute")


def kl_estimator_of(args: Any, default: str = "k3") -> str:
    """The option `kl_estimator`. A field of that name in a class of the user's may mean something else to them."""
    if not getattr(type(args), "_has_fused_options", False):
        for cls in type(args).__mro__:
            if cls not in GRPOConfig.__mro__ and "kl_estimator" in vars(cls):
                return default
    return getattr(args, "kl_estimator", default)


@dataclass(frozen=True)
class FusedOptions:
    """
    The options that [`FusedGRPOConfig`] adds to TRL's, under its names and with its defaults. What each does is said
    there.

    Raises:
        `ValueError`: when an option has a value that it cannot have; the message names both.
    """

    fused_backward: str = "auto"
    fused_logits_mib: float | None = None
    fused_layout: str = "auto"
    fused_skip_old_logps: bool | None = None
    fused_require_on_policy: bool = False
    fused_share_prompts: bool = True
    fused_lora: bool = True
    fused_balance: bool | None = None
    fused_max_tokens_per_forward: int | None = None
    fused_skip_zero_grad_sequences: bool = False
    fused_kernels: bool = True
    fused_compile: bool = False
    fused_memory: float | None = None
    fused_verify: int = 0
    kl_estimator: str = "k3"

    @classmethod
    def from_args(cls, args: Any, defaults: Self | None = None) -> Self:
        """
        Read the options of a trainer.

        Args:
            args (`GRPOConfig`): its arguments.
            defaults ([`FusedOptions`], *optional*): what holds where they have no such field, as TRL's own.
        """
        defaults = defaults or cls()
        values: dict[str, Any] = {name: getattr(args, name, default) for name, default in vars(defaults).items()}
        values["kl_estimator"] = kl_estimator_of(args, defaults.kl_estimator)
        return cls(**values)

    def __post_init__(self):
        for name, choices in (
            ("fused_layout", LAYOUTS),
            ("fused_backward", BACKWARD_MODES),
            ("kl_estimator", KL_ESTIMATORS),
        ):
            value = getattr(self, name)
            if value not in choices:
                *others, last = (f'"{choice}"' for choice in choices)
                raise ValueError(f"{name} must be {', '.join(others)} or {last}, not {value!r}.")
        if self.fused_max_tokens_per_forward is not None and self.fused_max_tokens_per_forward < 0:
            raise ValueError(
                f"fused_max_tokens_per_forward must be None, 0 or positive, not {self.fused_max_tokens_per_forward}."
            )
        if self.fused_logits_mib is not None and self.fused_logits_mib <= 0:
            raise ValueError(f"fused_logits_mib must be positive or None, not {self.fused_logits_mib}.")
        if self.fused_memory is not None and not 0 < self.fused_memory <= 1:
            raise ValueError(
                "fused_memory must be a fraction of the device's memory, above 0 and at most 1, or None, not "
                f"{self.fused_memory}."
            )
        if self.fused_verify < 0:
            raise ValueError(f"fused_verify must be 0 or positive, not {self.fused_verify}.")

    @property
    def forces_rows(self) -> bool:
        """Whether packed rows were asked for: the user's word that unknown model code may have them."""
        return self.fused_layout == "packed"


@dataclass
class FusedGRPOConfig(GRPOConfig):
    """
    [`~trl.GRPOConfig`] with the fused loss on, and its further options.

    A trainer reads the `fused_*` options when it is made and when a training begins.

    Args:
        use_liger_loss (`bool`, *optional*, defaults to `True`):
            Whether to compute the loss through the fused linear function.
        fused_backward (`str`, *optional*, defaults to `"auto"`):
            How gradients of a trained output projection are built. `"forecast"` computes them in the forward, with the
            gradient that each token is expected to receive; `"recompute"` computes the logits again in the backward;
            `"auto"` takes the cheaper one.
        fused_logits_mib (`float`, *optional*):
            Memory for one chunk of logits, in MiB. By default the peak stays below that of TRL 1.16.
        fused_layout (`str`, *optional*, defaults to `"auto"`):
            How the sequences of a micro-batch are laid out for the model: `"packed"` (all in one row without padding)
            or `"padded"` (as TRL pads them). `"auto"` packs them where level and model allow it. `"packed"` is your
            word that code of the model that is not a library's may have such rows, and raises where the model does not
            allow them.
        fused_skip_old_logps (`bool`, *optional*):
            Until the weights move, take old log-probs, and vLLM's importance ratio, from the training forward instead
            of a forward of their own. By default this happens where it is possible; `True` also logs where it is not,
            `False` computes them after generation.
        fused_require_on_policy (`bool`, *optional*, defaults to `False`):
            Raise, in the constructor where it is known there, when the weights move while a generation batch is in use,
            or old log-probs need a forward of their own. The message says what stands against it.
        fused_share_prompts (`bool`, *optional*, defaults to `True`):
            Run the prompt of several completions in a packed forward through the model once. Has no effect in models
            with layers that carry a state, or whose attention knows no packed rows.
        fused_lora (`bool`, *optional*, defaults to `True`):
            Add the low-rank products of PEFT's LoRA layers within the products of the layers that carry them, without
            scale, cast and sum over all features.
        fused_balance (`bool`, *optional*):
            By default processes exchange sequences after generation, so that all have about the same work, where loss
            and metrics stay the same (TRL 1.13 and later). `True` also exchanges under earlier releases of TRL, whose
            logged means then change and whose gradient does not, and logs once why nothing can be exchanged where that
            is so. `False` leaves every sequence where it is.
        fused_max_tokens_per_forward (`int`, *optional*):
            Run packed micro-batches of an accumulation window through the model together, up to this many tokens. Each
            keeps a loss of its own. Defaults to the size of TRL's padded micro-batch, at most 16,384, and for the first
            forward of a window to what fits into the memory of gradients that are not there yet, at most 32,768. 0 runs
            each alone, in the least memory.
        fused_skip_zero_grad_sequences (`bool`, *optional*, defaults to `False`):
            Leave sequences that can receive no gradient (advantage zero at `beta=0`) out of the model. The `entropy`
            metric then covers the others only, and so do `sampling/...` where vLLM's ratio comes from the training
            forward.
        fused_kernels (`bool`, *optional*, defaults to `True`):
            Run RMS norms, gated activations and rotary embeddings of the text model in one Triton kernel each, on CUDA,
            in this trainer's forwards and backwards alone. Those that compute something else stay as they are. Under
            autocast projections of the same input cast it once.
        fused_compile (`bool`, *optional*, defaults to `False`):
            Compile the decoder layers of the text model with `torch.compile`, one code for all layers of a kind and
            all lengths, in this trainer's forwards of packed rows. torch's partitioner decides what they keep for
            backward, in place of checkpointing. The first step takes up to a minute longer. Needs Triton on CUDA and a
            C++ compiler on the CPU. Layers that cannot be compiled run as they are, which is logged once.
        fused_memory (`float`, *optional*):
            Fraction of the device's memory that this process may take, for larger shared forwards, as soon as the
            first optimizer step has shown what one takes. By default memory stays at TRL's. Acts on CUDA.
        fused_verify (`int`, *optional*, defaults to `0`):
            Every so many optimizer steps, compute one micro-batch by TRL's own path too, and log how far the fused one
            is from it: log-probs as `fused/verify_logps`, in nats, the gradient in a trained output projection as
            `fused/verify_head_grad`. The first step compares log-probs in any case. Beyond what rounding explains, rows
            keep TRL's padding from then on. Training stays the same to the bit.
        kl_estimator (`str`, *optional*, defaults to `"k3"`):
            How the KL divergence from the reference is estimated at each token, see [`~objective.kl_loss`]. Another one
            than TRL's `"k3"` is logged as `kl/<estimator>` in place of `kl`, under the name of what is computed:
            `use_bias_correction_kl` makes `k4` of `k1` and `k2_bias_corrected` of `k2`.
    """

    _has_fused_options: ClassVar[bool] = True

    use_liger_loss: bool = field(default=True, metadata={"help": _HELP})
    fused_backward: str = field(
        default=FusedOptions.fused_backward,
        metadata={
            "help": "How gradients of a trained output projection are built.",
            "choices": list(BACKWARD_MODES),
        },
    )
    fused_logits_mib: float | None = field(
        default=FusedOptions.fused_logits_mib,
        metadata={"help": "Memory for one chunk of logits, in MiB (default: by the shapes)."},
    )
    fused_layout: str = field(
        default=FusedOptions.fused_layout,
        metadata={"help": "How the sequences of a micro-batch are laid out.", "choices": list(LAYOUTS)},
    )
    fused_skip_old_logps: bool | None = field(
        default=FusedOptions.fused_skip_old_logps,
        metadata={
            "help": "Take old log-probs from the training forward until the weights move (default: if possible)."
        },
    )
    fused_require_on_policy: bool = field(
        default=FusedOptions.fused_require_on_policy,
        metadata={"help": "Raise where steps are not on-policy, or old log-probs need a forward of their own."},
    )
    fused_share_prompts: bool = field(
        default=FusedOptions.fused_share_prompts,
        metadata={"help": "Run a prompt through the model once for its completions in a packed forward."},
    )
    fused_lora: bool = field(
        default=FusedOptions.fused_lora,
        metadata={"help": "Add LoRA's low-rank products within the products of the layers that carry them."},
    )
    fused_balance: bool | None = field(
        default=FusedOptions.fused_balance,
        metadata={"help": "Exchange sequences between processes, so that all have about the same work."},
    )
    fused_max_tokens_per_forward: int | None = field(
        default=FusedOptions.fused_max_tokens_per_forward,
        metadata={"help": "Tokens of the micro-batches that run together (default: in TRL's memory)."},
    )
    fused_skip_zero_grad_sequences: bool = field(
        default=FusedOptions.fused_skip_zero_grad_sequences,
        metadata={"help": "Leave sequences that receive no gradient out of the model."},
    )
    fused_kernels: bool = field(
        default=FusedOptions.fused_kernels,
        metadata={"help": "Run RMS norms, gated activations and rotary embeddings in one kernel each, on CUDA."},
    )
    fused_compile: bool = field(
        default=FusedOptions.fused_compile,
        metadata={"help": "Compile the decoder layers of the text model with torch.compile."},
    )
    fused_memory: float | None = field(
        default=FusedOptions.fused_memory,
        metadata={"help": "Fraction of the device's memory to take for speed (default: no more than TRL)."},
    )
    fused_verify: int = field(
        default=FusedOptions.fused_verify,
        metadata={"help": "Compare a micro-batch with TRL's own path every so many optimizer steps (default: never)."},
    )
    kl_estimator: str = field(
        default=FusedOptions.kl_estimator,
        metadata={"help": "Estimator of the KL divergence.", "choices": list(KL_ESTIMATORS)},
    )

    def __post_init__(self):
        super().__post_init__()
        FusedOptions.from_args(self)  # refuses what an option cannot be
