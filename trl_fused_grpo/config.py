"""
`use_liger_loss` for TRL's `GRPOConfig` and `RLOOConfig` on every version, and `FusedGRPOConfig` with the further
options (`options.py`).
"""

import functools
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import logging
from trl import GRPOConfig, RLOOConfig

from ._compat.dataclass_fields import add_field
from .options import FusedOptions as FusedOptions


logger = logging.get_logger(__name__)
_FIELD = "use_liger_loss"
_HELP = "Whether the fused trainer has the fused loss, at parity with TRL's own path; false: TRL's own loss."


def _keep_flag_through_post_init(cls: Any) -> None:
    """Hide `use_liger_loss` from TRL's `__post_init__`, which would act on it."""
    original = cls.__post_init__

    @functools.wraps(original)
    def post_init(self):
        # TRL 0.27 warns about the field, turns `use_liger_kernel` on for it and then refuses `delta`
        fused, kernel = self.use_liger_loss, self.use_liger_kernel
        if not isinstance(fused, bool | None):
            raise ValueError(f"{_FIELD} must be None, True or False, not {fused!r}.")
        self.use_liger_loss = None
        if fused:
            self.use_liger_kernel = False
        original(self)
        self.use_liger_loss, self.use_liger_kernel = fused, kernel

    cls.__post_init__ = post_init


def install_use_liger_loss(cls: Any) -> None:
    """
    Make `use_liger_loss` a dataclass field of a class of TRL's arguments. Its default, `None`, says nothing: a fused
    trainer has the fused loss then. The class itself is changed, so that it does not matter how or when it was
    imported. Argument parsers, `to_dict` and saved arguments see the field.
    """
    # `bool` as in TRL 0.27, which has the field: of `bool | None` a parser does not take `--use_liger_loss` alone
    add_field(cls, _FIELD, bool, field(default=None, metadata={"help": _HELP}))
    _keep_flag_through_post_init(cls)


install_use_liger_loss(GRPOConfig)
install_use_liger_loss(RLOOConfig)


class OptionsOfConfig(FusedOptions):
    """[`FusedOptions`] in a class of a trainer's arguments, before TRL's."""

    use_liger_loss: bool

    def __post_init__(self, *init_vars: Any):
        super().__post_init__()
        super(FusedOptions, self).__post_init__(*init_vars)  # ty: ignore[missing-attribute] - TRL's
        changed = [
            f"{name}={getattr(self, name)!r}"
            for name, default in vars(FusedOptions()).items()
            if getattr(self, name) != default
        ]
        if self.use_liger_loss is False and changed:
            logger.warning_once(f"{', '.join(changed)}: no effect, because use_liger_loss=False.")


@dataclass
class FusedGRPOConfig(OptionsOfConfig, GRPOConfig):
    """
    [`~trl.GRPOConfig`] with the fused loss on, and its further options.

    A trainer reads the `fused_*` options when it is made and when a training begins. `None` means that the training
    decides. Those behind `kl_estimator` are rarely needed.

    Args:
        use_liger_loss (`bool`, *optional*, defaults to `True`):
            Whether to compute the loss through the fused linear function; with `False` it is TRL's own trainer.
        fused_compile (`bool`, *optional*):
            Compile the decoder layers of the text model with `torch.compile`, one code for all layers of a kind, in
            forwards of packed rows. By default on CUDA, where Triton is installed; `True` needs a C++ compiler on the
            CPU. The first step takes some 10 to 40 s longer. Layers that cannot be compiled run as they are, which is
            logged once.
        fused_memory (`float`, *optional*):
            Fraction of the device's memory that this process may take, for larger shared forwards, as soon as the
            first optimizer step has shown what one takes. By default memory stays at TRL's. Acts on CUDA.
        fused_max_tokens_per_forward (`int`, *optional*):
            Run packed micro-batches of an accumulation window through the model together, up to this many tokens. Each
            keeps a loss of its own. Defaults to what fits the memory that TRL takes with its padding, at most 32,768.
            0 runs each alone, in the least memory.
        fused_verify (`int`, *optional*, defaults to `0`):
            Every so many optimizer steps, compute log-probs of one micro-batch by TRL's own path too, and log how far
            the fused ones are from them: `fused/verify_logps`, in nats. The first step compares them in any case.
            Beyond what rounding explains, rows keep TRL's padding from then on. Training stays the same to the bit.
        kl_estimator (`str`, *optional*, defaults to `"k3"`):
            How the KL divergence from the reference is estimated, see [`~objective.kl_loss`]. Another one than TRL's
            `"k3"` is logged as `kl/<estimator>`: `use_bias_correction_kl` makes `k4` of `k1`.
        fused_layout (`str`, *optional*):
            How the sequences of a micro-batch are laid out: `"packed"` (all in one row without padding) or `"padded"`
            (as TRL pads them). By default packed where level and model allow it. `"packed"` is your word that unknown
            model code may have such rows, and raises where a known model does not allow them.
        fused_backward (`str`, *optional*):
            How gradients of a trained output projection are built. `"forecast"` computes them in the forward, with the
            gradient that each token is expected to receive; `"recompute"` computes the logits again in the backward.
            By default the cheaper one.
        fused_logits_mib (`float`, *optional*):
            Memory for one chunk of logits, in MiB. By default the peak stays below that of TRL 1.16.
        fused_skip_old_logps (`bool`, *optional*):
            Until the weights move, take old log-probs, and vLLM's importance ratio, from the training forward. By
            default where that is possible; `True` also logs where it is not, `False` computes them after generation.
        fused_skip_zero_grad_sequences (`bool`, *optional*, defaults to `False`):
            Leave sequences that can receive no gradient (advantage zero at `beta=0`) out of the model. The metrics
            `entropy` and, where vLLM's ratio comes from the training forward, `sampling/...` cover the others only.
        fused_share_prompts (`bool`, *optional*, defaults to `True`):
            Run the prompt of several completions in a packed forward through the model once. Has no effect in models
            with layers that carry a state, or whose attention knows no packed rows.
        fused_keep_base_weights (`bool`, *optional*, defaults to `False`):
            With adapters and vLLM, put the weights under the adapters back to the bit after each synchronisation. TRL
            merges adapters into them and takes them out again, which rounds 16-bit weights a little more at each step.
            While it synchronises, a copy of these weights is kept.
    """

    use_liger_loss: bool = field(default=True, metadata={"help": _HELP})
