"""What the lists of customised cases have in common: data, options, and a short way to write a case."""

from typing import Any

from tests.harness.case import UNEVEN_LENGTHS, Customisation, Training
from trl_fused_grpo.parity.case import Rollout


PLAIN, UNEVEN = Rollout(), Rollout(lengths=UNEVEN_LENGTHS)
SAMPLED = Rollout(sampling="token", lengths=UNEVEN_LENGTHS)  # as if vLLM had generated
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
) -> Training:
    """
    A case that compares whole trainings.

    Args:
        name, description (`str`):
            See [`Training`].
        customised ([`Customisation`], *optional*):
            What the user changes. Without it the case is about the model's own code.
        config (`dict[str, Any]`, *optional*):
            `GRPOConfig` options.
        **more:
            Other fields of the [`Training`]; `data` is [`UNEVEN`] when left out.
    """
    data = more.pop("data", UNEVEN)
    custom = customised or Customisation()
    return Training(name, description, config or {}, data, customised=custom, recomputed="any", **more)
