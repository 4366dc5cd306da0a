"""
How options are drawn, and the options that are drawn last: what a seed drew before they were added stays as it was.
"""

import random
from typing import Any, TypeAlias


# What differs from `Case()`, and options of `FusedGRPOConfig` (`fused_`, `kl_estimator`) and `GRPOConfig`
Options: TypeAlias = dict[str, Any]

# Options of `FusedGRPOConfig` that are not drawn, with the reason
NOT_DRAWN = {
    "use_liger_loss": "it is what is compared: on in the fused trainer, and stock trains without it",
    "fused_keep_base_weights": "it acts when weights go to vLLM; `tests/training/test_base_weights.py` has it",
}
# With a KL term stock has the first alone; without one each must train what stock does
KL_ESTIMATORS = ("k3", "k1", "k2", "k4")


class Draw:
    """Options as they are drawn, each with a probability."""

    def __init__(self, key: str):
        self.generator = random.Random(key)
        self.options: Options = {}

    def chance(self, probability: float) -> bool:
        return self.generator.random() < probability

    def maybe(self, probability: float, name: str, *values: Any) -> bool:
        """With this probability, set an option to one of its values."""
        is_set = self.chance(probability)
        if is_set:
            self.options[name] = self.generator.choice(values)
        return is_set

    def skip(self, probability: float, *values: Any) -> None:
        """Draw an option that there is no more, so that recorded seeds draw of all others what they drew."""
        if self.chance(probability):
            self.generator.choice(values)

    def some(self, probability: float, name: str, count: int) -> None:
        """With this probability, set an option to one or two of so many numbers."""
        if self.chance(probability):
            self.options[name] = sorted({self.generator.randrange(count) for _ in range(2)})


def draw_last_options(drawing: Draw) -> None:
    """
    Draw the options that are drawn after all others. A new one goes to the end of this function.

    Args:
        drawing ([`Draw`]):
            With all other options.
    """
    options = drawing.options
    drawing.maybe(0.1, "fused_verify", 1)
    if drawing.maybe(0.12, "fused_skip_zero_grad_sequences", True) and options.get("rollout"):
        drawing.maybe(0.6, "equal_completions", True)  # without it no advantage is zero
    drawing.skip(0.08, False)  # an option of earlier cases
    if _is_on_policy(options):  # of which there was an option
        drawing.skip(0.12, True)
    drawing.maybe(0.06, "kl_estimator", *(KL_ESTIMATORS[:1] if options.get("beta") else KL_ESTIMATORS))


def _is_on_policy(options: Options) -> bool:
    """Return `True` if no step of a case with these options needs old log-probs from another forward."""
    steps_per_window = options.get("gradient_accumulation_steps", 1)
    steps = options.get("steps_per_generation", steps_per_window) * options.get("num_iterations", 1)
    if steps_per_window % steps != 0:
        return False
    has_ratios = options.get("rollout") and options.get("sampling")
    if not has_ratios or options.get("vllm_importance_sampling_correction") is False:
        return True
    # The training forward gives them, unless somebody may read or change what lies between generation and backward
    return options.get("fused_skip_old_logps") is not False and "stepwise" not in options
