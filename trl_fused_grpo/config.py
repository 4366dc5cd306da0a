"""`use_liger_loss` for TRL's `GRPOConfig` on every version, and `FusedGRPOConfig` with our further options."""

import functools
import inspect
from dataclasses import Field, dataclass, field
from typing import Any

from trl import GRPOConfig


_FIELD = "use_liger_loss"
_HELP = "Whether FusedGRPOTrainer computes the loss through the fused linear function, at parity with TRL's own path."


# What `dataclass` generates, and refuses to replace or leaves as it is where it stands
_GENERATED = ("__init__", "__repr__", "__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__")


def _regenerate(cls: type) -> None:
    """Run `dataclass` over a class once more, in place, from the fields that it has now."""
    own, params = vars(cls)["__dataclass_fields__"], vars(cls)["__dataclass_params__"]
    for name in inspect.get_annotations(cls):
        if name in own and not isinstance(vars(cls).get(name), Field):
            setattr(cls, name, own[name])
    for name in _GENERATED:
        method = vars(cls).get(name)
        if name == "__repr__":
            method = inspect.unwrap(method) if method else None  # `dataclass` wraps it against recursion
        code = getattr(method, "__code__", None)
        # What is generated has no source file; of a hash that is None `dataclass` makes what was asked for again
        if (code and code.co_filename == "<string>") or (name == "__hash__" and name in vars(cls) and method is None):
            delattr(cls, name)
    dataclass(**{name: getattr(params, name) for name in ("init", "repr", "eq", "order", "unsafe_hash")})(cls)


def _descendants(cls: type) -> list[type]:
    """Subclasses of every depth, each after those that it inherits from."""
    found: set[type] = set()
    waiting = [cls]
    while waiting:
        new = [sub for sub in waiting.pop().__subclasses__() if sub not in found]
        found.update(new)
        waiting += new
    return sorted(found, key=lambda sub: len(sub.__mro__))  # a class has more ancestors than any of them


def _spare_the_alias(cls: Any) -> None:
    """Keep `__post_init__` from reading `use_liger_loss` and, where it is set, from refusing what is supported here."""
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
    Make `use_liger_loss` a dataclass field of `GRPOConfig`, default `False`, in the class itself, so that it does not
    matter how or when it was imported. Argument parsers, `to_dict` and saved arguments see it. Idempotent.
    """
    if getattr(cls, "_has_fused_loss", False):
        return
    cls.__annotations__[_FIELD] = bool  # up to TRL 0.27 it is there, with another default
    setattr(cls, _FIELD, field(default=False, metadata={"help": _HELP}))
    _regenerate(cls)
    _spare_the_alias(cls)
    cls._has_fused_loss = True
    for subclass in _descendants(cls):
        if "__dataclass_fields__" in vars(subclass):  # another one inherits what is generated
            _regenerate(subclass)


install_use_liger_loss()


@dataclass
class FusedGRPOConfig(GRPOConfig):
    """
    [`~trl.GRPOConfig`] with the fused loss on and its further options.

    Args:
        use_liger_loss (`bool`, *optional*, defaults to `True`):
            Whether to compute the loss through the fused linear function.
        fused_backward (`str`, *optional*, defaults to `"auto"`):
            `"forecast"` or `"recompute"` force how gradients of a trained head are built, `"auto"` takes the cheaper.
        fused_logits_mib (`float`, *optional*):
            Memory for the chunk of logits, in MiB. Defaults to what keeps the peak below that of TRL 1.16.
        fused_layout (`str`, *optional*, defaults to `"auto"`):
            `"packed"` (all sequences of a micro-batch in one row without padding), `"aligned"` (rows shifted left and
            cut to the longest) or `"padded"` (as TRL pads them); `"auto"` takes the first that the model allows.
            Forcing one that it does not allow raises.
        fused_skip_old_logps (`bool`, *optional*):
            With vLLM and on-policy steps, take the importance ratio from the training pass instead of computing old
            log-probs in a forward of their own. Defaults to where that is possible; `True` also tells where it is not.
        fused_share_prompts (`bool`, *optional*, defaults to `True`):
            Run the prompt of several completions in a packed micro-batch through the model once. Needs
            `attn_implementation="sdpa"`.
        fused_balance (`bool`, *optional*, defaults to `False`):
            Deal sequences into micro-batches by prompt and length where the loss does not depend on the cut, instead of
            at random. Logged means over micro-batches (`entropy`, `kl`, `clip_ratio/*`) follow the cut. Worth it where
            micro-batches do not share passes.
        fused_max_tokens_per_forward (`int`, *optional*):
            Run packed micro-batches of an accumulation window through the model together, up to this many tokens; the
            loss remains that of each. Defaults to the size of TRL's padded micro-batch, at most 16,384. 0 runs each
            alone, in the least memory.
        fused_skip_zero_grad_sequences (`bool`, *optional*, defaults to `False`):
            Leave sequences that can receive no gradient (advantage zero at `beta=0`) out of the model. The `entropy`
            metric then covers the others only.
        kl_estimator (`str`, *optional*, defaults to `"k3"`):
            How the KL divergence from the reference is estimated at each token, see [`~objective.kl_loss`]. Another one
            than TRL's `"k3"` is logged as `kl/<estimator>` in place of `kl`, under the name of what is computed:
            `use_bias_correction_kl` makes `k4` of `k1` and `k2_bias_corrected` of `k2`.
    """

    use_liger_loss: bool = field(default=True, metadata={"help": _HELP})
    fused_backward: str = field(
        default="auto",
        metadata={"help": "How gradients of a trained head are built.", "choices": ["auto", "forecast", "recompute"]},
    )
    fused_logits_mib: float | None = field(
        default=None, metadata={"help": "Memory for the chunk of logits, in MiB (default: by the shapes)."}
    )

    fused_layout: str = field(
        default="auto",
        metadata={"help": "Layout of the rows.", "choices": ["auto", "packed", "aligned", "padded"]},
    )
    fused_skip_old_logps: bool | None = field(
        default=None,
        metadata={"help": "Take vLLM's importance ratio from the training pass (default: where that is possible)."},
    )
    fused_share_prompts: bool = field(
        default=True, metadata={"help": "Run a prompt through the model once for its completions in a micro-batch."}
    )
    fused_balance: bool = field(
        default=False, metadata={"help": "Deal sequences into micro-batches by prompt and length."}
    )
    fused_max_tokens_per_forward: int | None = field(
        default=None, metadata={"help": "Tokens of the micro-batches that run together (default: a padded one's)."}
    )
    fused_skip_zero_grad_sequences: bool = field(
        default=False, metadata={"help": "Leave sequences without gradient out of the model."}
    )
    kl_estimator: str = field(
        default="k3", metadata={"help": "Estimator of the KL divergence.", "choices": ["k1", "k2", "k3", "k4"]}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.fused_layout not in ("auto", "packed", "aligned", "padded"):
            raise ValueError(
                f'fused_layout must be "auto", "packed", "aligned" or "padded", not {self.fused_layout!r}.'
            )
        if self.fused_backward not in ("auto", "forecast", "recompute"):
            raise ValueError(f'fused_backward must be "auto", "forecast" or "recompute", not {self.fused_backward!r}.')
        if self.kl_estimator not in ("k1", "k2", "k3", "k4"):
            raise ValueError(f'kl_estimator must be "k1", "k2", "k3" or "k4", not {self.kl_estimator!r}.')
        if self.fused_max_tokens_per_forward is not None and self.fused_max_tokens_per_forward < 0:
            raise ValueError(
                f"fused_max_tokens_per_forward must be None, 0 or positive, not {self.fused_max_tokens_per_forward}."
            )
        if self.fused_logits_mib is not None and self.fused_logits_mib <= 0:
            raise ValueError(f"fused_logits_mib must be positive or None, not {self.fused_logits_mib}.")
