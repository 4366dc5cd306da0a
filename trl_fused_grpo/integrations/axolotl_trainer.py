"""`FusedAxolotlGRPOTrainer`: what axolotl's `trainer_cls` names. Import it after axolotl has registered its plugins."""

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer  # ty: ignore[import-not-found]

from trl_fused_grpo.fusing import fuse


# The optimizers, schedulers and saving of axolotl's class come first, then the methods of FusedGRPOTrainer
FusedAxolotlGRPOTrainer = fuse(AxolotlGRPOTrainer)
