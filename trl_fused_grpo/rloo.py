"""`FusedRLOOTrainer`: TRL's `RLOOTrainer` with its log-probabilities taken from the fused linear function."""

from typing import Any, ClassVar

from trl import RLOOConfig, RLOOTrainer

from ._utils import shown_as
from .trainer import FusedTrainerMixin


class FusedRLOOTrainer(FusedTrainerMixin, RLOOTrainer):  # ty: ignore[lost-keyword-for-regular-parameter] - TRL's name
    """
    Drop-in for [`~trl.RLOOTrainer`]: the same constructor, objective and metrics, without `[batch, length, vocab]`
    logits. What stands at [`FusedGRPOTrainer`] holds here too.

    ```python
    from trl_fused_grpo import FusedRLOOConfig, FusedRLOOTrainer

    args = FusedRLOOConfig(output_dir="out")
    trainer = FusedRLOOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=dataset)
    trainer.train()
    ```

    - TRL's own `_compute_loss` makes the loss of fused log-probabilities. Its gradient is forecast in forward.
    - The KL penalty is a part of the reward. So old and reference log-probs are computed in generation where `beta` is
      not zero, as TRL does. At `beta=0.0` on-policy steps take the old ones from the training forward.
    - `kl_estimator` has no effect, and neither have options that RLOO lacks.

    Raises:
        `ValueError`: in the constructor, when model or options cannot be fused; the message says what to change.
    """

    args: RLOOConfig
    _tag_names: ClassVar[list[str]] = [*getattr(RLOOTrainer, "_tag_names", []), "fused-rloo"]  # ty: ignore[incompatible-attribute-override]

    @shown_as(RLOOTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
