"""What came out of a comparison."""

from dataclasses import dataclass, field


@dataclass
class Result:
    """
    Outcome of one case.

    Attributes:
        name (`str`): the case's name.
        description (`str`): what the case compares.
        verdict (`str`): `"equal"`, `"different"`, `"failed"` (an exception) or `"skipped"` (does not apply here).
        reason (`str`): why it is not equal.
        loss (`float`, *optional*): stock's loss, summed over micro-batches.
        loss_error (`float`, *optional*): relative error of the fused trainer's loss: against stock's in float32,
            against float64 in bfloat16.
        gradient_error (`float`, *optional*): relative error of the worst parameter's gradient against the same
            reference. In bfloat16 the worst parameter is the one whose error is largest relative to stock's.
        worst_parameter (`str`, *optional*): the parameter it belongs to.
        stock_loss_error, stock_gradient_error (`float`, *optional*): stock's errors against float64 for the same loss
            and parameter, bfloat16 only.
        metrics_differ (`list[str]`): logged metrics whose names or, in float32, values differ.
        fused_ratio (`float`, *optional*): the fused trainer's gradient norm over stock's.
        liger_ratio (`float`, *optional*): stock Liger's gradient norm over stock's.
        liger_error (`float`, *optional*): the distance of stock Liger's gradients from stock's, relative to their norm.
        liger (`str`): why there is no `liger_ratio` though TRL has a Liger loss: `"refuses"`, `"fails"`, or empty.
        recomputed (`float`, *optional*): fraction of rows that backward had to compute again.
        layout (`str`, *optional*): how the fused trainer laid the rows out: `"packed"` or `"padded"`.
        seconds (`float`): time the case took.
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
