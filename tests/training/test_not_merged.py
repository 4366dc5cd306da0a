"""Micro-batches that share no forward: the user's losses, copies, padded rows; and what is logged of it."""

import pytest

from tests.tiny_training import make_trainer
from tests.training.shared_forwards import PLENTY, assert_same_training, train
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo.training.plan import why_forwards_are_not_shared


pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def warnings_logged(caplog):
    """How often a warning that begins so was logged in this test."""
    return lambda start: sum(record.message.startswith(start) for record in caplog.records)


def test_with_zero_tokens_per_forward_every_micro_batch_runs_alone(tmp_path):
    together, alone = (train(tmp_path, fused_max_tokens_per_forward=tokens) for tokens in (PLENTY, 0))
    assert len(alone[2]) == 4 * len(together[2])
    assert_same_training(alone, together)


def test_a_loss_of_the_users_gets_every_micro_batch(tmp_path):
    class Doubled(FusedGRPOTrainer):
        def compute_liger_loss(self, model, inputs):
            return 2 * super().compute_liger_loss(model, inputs)

    plain = train(tmp_path, fused_max_tokens_per_forward=PLENTY, learning_rate=0.1, max_grad_norm=1e9)
    doubled = train(tmp_path, Doubled, fused_max_tokens_per_forward=PLENTY, learning_rate=0.05, max_grad_norm=1e9)
    assert len(doubled[2]) == 4 * len(plain[2])
    assert doubled[1][0]["grad_norm"] == pytest.approx(2 * plain[1][0]["grad_norm"], rel=1e-5)


def test_padded_rows_share_no_forward(tmp_path, warnings_logged):
    _, _, forwards = train(tmp_path, fused_layout="padded", fused_max_tokens_per_forward=PLENTY)
    assert len(forwards) == 8
    assert warnings_logged("fused_max_tokens_per_forward has no effect") == 1


def test_an_option_that_was_not_set_is_not_said_to_have_no_effect(tmp_path, warnings_logged):
    train(tmp_path, fused_layout="padded")
    assert warnings_logged("fused_max_tokens_per_forward") == 0


def test_copies_of_trls_micro_batches_share_no_forward(tmp_path):
    class Copying(FusedGRPOTrainer):
        def _prepare_inputs(self, generation_batch):
            return dict(super()._prepare_inputs(generation_batch))

    assert len(train(tmp_path, Copying, fused_max_tokens_per_forward=PLENTY)[2]) == 8


def test_an_auxiliary_loss_is_computed_in_each_micro_batch(tmp_path):
    trainer = make_trainer(tmp_path)
    assert why_forwards_are_not_shared(trainer, trainer._fused.ladder.findings, True) is None
    trainer.aux_loss_enabled = True
    assert "auxiliary loss" in str(why_forwards_are_not_shared(trainer, trainer._fused.ladder.findings, True))


def test_negative_tokens_are_refused(tmp_path):
    with pytest.raises(ValueError, match="fused_max_tokens_per_forward"):
        make_trainer(tmp_path, fused_max_tokens_per_forward=-1)
