"""What the lists of customised cases have in common: data, options, and a short way to write a case."""

from typing import Any

from trl_fused_grpo.parity.case import Case, Customisation, Rollout


PLAIN, UNEVEN, WITH_MARKER = Rollout(), Rollout(uneven=True), Rollout(uneven=True, has_marker=True)
SAMPLED = Rollout(sampling="token", uneven=True)  # as if vLLM had generated
VLLM = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
KL = {"beta": 0.5}
OFF_POLICY = {"steps_per_generation": 8}  # the second accumulation window of a generation batch has old log-probs
AS_PADDED = {"fused_layout": "padded"}  # dropout of single elements draws its numbers in the order of TRL's columns


def customised_case(
    name: str,
    description: str,
    customised: Customisation | None = None,
    config: dict[str, Any] | None = None,
    **more: Any,
) -> Case:
    """
    A case that compares whole trainings.

    Args:
        name, description (`str`):
            See [`Case`].
        customised ([`Customisation`], *optional*):
            What the user changes. Without it the case is about the model's own code.
        config (`dict[str, Any]`, *optional*):
            `GRPOConfig` options.
        **more:
            Other fields of the [`Case`]; `data` is [`UNEVEN`] when left out.
    """
    data = more.pop("data", UNEVEN)
    custom = customised or Customisation()
    return Case(name, description, config or {}, data, customised=custom, recomputed="any", **more)
