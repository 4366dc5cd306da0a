"""What the cases of customisation have in common."""

from typing import Any

from .case import Case, Customisation, Rollout


PLAIN, UNEVEN, MARKED = Rollout(), Rollout(uneven=True), Rollout(uneven=True, marked=True)
SAMPLED = Rollout(sampling="token", uneven=True)
VLLM = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
OFF_POLICY = {"steps_per_generation": 8}  # the second window of a generation batch has old log-probs
AS_PADDED = {"fused_layout": "padded"}  # dropout of single elements draws its numbers in the order of TRL's columns


def case(
    name: str, covers: str, done: Customisation | None = None, config: dict[str, Any] | None = None, **more: Any
) -> Case:
    """A case of whole trainings; without `done` nothing is customised, and the model's own habits are the case."""
    data = more.pop("data", UNEVEN)
    return Case(name, covers, config or {}, data, customised=done or Customisation(), recomputed="any", **more)
