"""What came out of a comparison."""

from dataclasses import dataclass, field


DEVICE_LOST = "the device is lost"  # how the reason of such a result begins


@dataclass
class Result:
    """
    Outcome of one case.

    Attributes:
        name (`str`):
            The case's name.
        description (`str`):
            What the case compares.
        verdict (`str`):
            `"equal"`, `"different"`, `"failed"` (an exception) or `"skipped"` (does not apply here). A drawn case can
            also be a `"tie"` or `"rounding"`, see [`rounding.rounding_verdict`], and in bfloat16 [`flips.flip_verdict`]
            and [`chance.chance_verdict`].
        reason (`str`):
            Why it is not equal.
        loss (`float`, *optional*):
            Stock's loss, summed over micro-batches; a training's `train_loss`.
        loss_error (`float`, *optional*):
            Relative error of the fused trainer's loss: against stock's in float32, against float64 in bfloat16.
        gradient_error (`float`, *optional*):
            Relative error of the worst parameter's gradient against the same reference. In bfloat16 the worst parameter
            is the one whose error is largest relative to stock's. In a training it is the error of the weights' change.
        worst_parameter (`str`, *optional*):
            The parameter it belongs to.
        stock_loss_error, stock_gradient_error (`float`, *optional*):
            Stock's errors against float64 for the same loss and parameter, bfloat16 only.
        metrics_differ (`list[str]`):
            Logged metrics whose names or, in float32, values differ.
        fused_ratio (`float`, *optional*):
            The fused trainer's gradient norm over stock's.
        liger_ratio (`float`, *optional*):
            Stock Liger's gradient norm over stock's.
        liger_error (`float`, *optional*):
            The distance of stock Liger's gradients from stock's, relative to their norm.
        liger (`str`):
            Why there is no `liger_ratio` though TRL has a Liger loss: `"refuses"`, `"fails"`, or empty.
        recomputed (`float`, *optional*):
            Fraction of rows that backward had to compute again.
        layout (`str`, *optional*):
            How the fused trainer laid the rows out: `"packed"` or `"padded"`.
        seconds (`float`):
            Time the case took.
    """

    name: str
    description: str
    verdict: str = "failed"
    reason: str = ""
    loss: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    worst_parameter: str | None = None
    stock_loss_error: float | None = None
    stock_gradient_error: float | None = None
    metrics_differ: list[str] = field(default_factory=list)
    fused_ratio: float | None = None
    liger_ratio: float | None = None
    liger_error: float | None = None
    liger: str = ""
    recomputed: float | None = None
    layout: str | None = None
    seconds: float = 0.0

    @property
    def is_rounding(self) -> bool:
        """Whether it is out of tolerance by rounding alone."""
        return self.verdict in ("tie", "rounding")

    @property
    def is_device_lost(self) -> bool:
        """Whether this process can run nothing more on its GPU."""
        return self.reason.startswith(DEVICE_LOST)
