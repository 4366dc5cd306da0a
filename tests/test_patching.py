"""patch(): trl.GRPOTrainer becomes the fused trainer and back."""

import trl
import trl.trainer.grpo_trainer as grpo_trainer

from trl_fused_grpo import FusedGRPOTrainer, patch


STOCK = FusedGRPOTrainer.__mro__[1]


def test_the_patch_lasts_as_long_as_its_context():
    with patch():
        assert trl.GRPOTrainer is grpo_trainer.GRPOTrainer is trl.trainer.GRPOTrainer is FusedGRPOTrainer
    assert trl.GRPOTrainer is grpo_trainer.GRPOTrainer is trl.trainer.GRPOTrainer is STOCK


def test_undoing_twice_undoes_once():
    handle = patch()
    handle.undo()
    outer = patch()
    handle.undo()
    assert trl.GRPOTrainer is FusedGRPOTrainer
    outer.undo()
    assert trl.GRPOTrainer is STOCK


def test_patching_twice_is_patching_once():
    with patch():
        with patch():
            pass
        assert trl.GRPOTrainer is FusedGRPOTrainer
    assert trl.GRPOTrainer is STOCK
