"""Options that are asked for: refused where they cannot hold, logged where they have no effect, kept otherwise."""

import logging
from itertools import product

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.oracle import relative_error
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo import FusedGRPOTrainer, patch
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.training.checks import log_what_has_no_effect
from trl_fused_grpo.training.plan import why_no_forecast

from .sampler import use_sampler


@pytest.fixture
def warnings_logged(caplog):
    """The warnings that were logged in this test."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class OwnObjective(FusedGRPOTrainer):
    """A trainer that changes the loss."""

    def _compute_loss(self, model, inputs):
        return 2 * super()._compute_loss(model, inputs)


OBJECTIVES = {
    "dapo": {"loss_type": "dapo"},
    "sequence level": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "luspo": {"loss_type": "luspo"},
    "kl": {"beta": 0.1, "use_bias_correction_kl": True},
    "sequence level, kl": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "beta": 0.1,
        "use_bias_correction_kl": False,
    },
    "sequence level, corrected kl": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "beta": 0.1,
        "use_bias_correction_kl": True,
    },
    "off-policy mask": {"off_policy_mask_threshold": 0.5},
    "entropy quantile": {"top_entropy_quantile": 0.5},
}
SCHEDULES = {
    "on-policy": (2, 2, 1),
    "misaligned": (1, 2, 1),
    "two iterations": (2, 2, 2),
    "two iterations in an accumulation window": (4, 2, 2),
}
SAMPLERS = {
    "no vLLM": None,
    "token_truncate": {},
    "sequence_mask": {},
    "sequence_mask, old log-probs": {"fused_skip_old_logps": False},
    "no correction": {"vllm_importance_sampling_correction": False},
}


def trainer_of(folder, objective, schedule, sampler):
    accumulation, generation, iterations = SCHEDULES[schedule]
    sampling = {} if SAMPLERS[sampler] is None else dict(SAMPLERS[sampler])
    if sampler.partition(",")[0] in ("token_truncate", "sequence_mask"):
        sampling["vllm_importance_sampling_mode"] = sampler.partition(",")[0]
    trainer = make_trainer(
        folder,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=generation,
        num_iterations=iterations,
        max_steps=2 if accumulation > 1 else 3,
        **OBJECTIVES[objective],
        **sampling,
    )
    if SAMPLERS[sampler] is not None:
        use_sampler(trainer)
    return trainer


def _lacks_a_forecast(trainer):
    """Whether a training with a forced forecast raises because a batch has none."""
    trainer.args.fused_backward = "forecast"
    try:
        trainer.train()
    except ValueError as error:
        if "needs a forecast" not in str(error):
            raise
        return True
    return False


MIN_TRL = {"vespo": (1, 0), "luspo": (0, 28)}
NEVER_FORECAST = ("entropy quantile",)


@pytest.mark.sample(2)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_constructor_refuses_a_forced_forecast_exactly_where_a_batch_would_have_none(tmp_path, objective):
    if trl_compat.TRL.release < MIN_TRL.get(objective, (0,)):
        pytest.skip(f"this TRL has no {objective}")
    grid = [("on-policy", "no vLLM")] if objective in NEVER_FORECAST else product(SCHEDULES, SAMPLERS)
    wrong = []
    for schedule, sampler in grid:
        trainer = trainer_of(tmp_path, objective, schedule, sampler)
        reason = why_no_forecast(trainer)
        if (reason is not None) != _lacks_a_forecast(trainer):
            wrong.append((schedule, sampler, reason))
    assert not wrong


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=1.0"),
    ],
    ids=["quantile"],
)
def test_the_constructor_refuses_a_forced_forecast_and_says_what_to_change(tmp_path, options, change):
    with pytest.raises(ValueError, match="leave fused_backward out") as error:
        make_trainer(tmp_path, fused_backward="forecast", **options)
    assert change in str(error.value)


def test_the_constructor_refuses_a_forced_forecast_with_an_objective_of_the_users(tmp_path):
    with pytest.raises(ValueError, match="_compute_loss"):
        make_trainer(tmp_path, OwnObjective, fused_backward="forecast")


def test_the_log_says_why_old_log_probs_are_not_skipped_where_that_was_asked_for(tmp_path, warnings_logged):
    make_trainer(tmp_path)
    assert not [line for line in warnings_logged() if "fused_skip" in line]
    make_trainer(tmp_path, fused_skip_old_logps=True)
    (line,) = [line for line in warnings_logged() if "fused_skip" in line]
    assert line.startswith("fused_skip_old_logps=True has no effect, because TRL computes none")


@pytest.mark.parametrize("window", SCHEDULES)
def test_old_log_probs_of_any_schedule_are_skipped_until_something_replaced_may_move_weights(
    tmp_path, warnings_logged, window
):
    trainer = trainer_of(tmp_path, "dapo", window, "token_truncate")
    trainer.args.fused_skip_old_logps = True
    before, engine = warnings_logged(), trainer._fused.engine
    engine.read_options()
    log_what_has_no_effect(trainer, engine.options, trainer._fused.look(), packed=True)
    assert warnings_logged() == before
    trainer.accelerator.backward = lambda *args, **kwargs: None
    findings = trainer._fused.look()  # as every window begins
    log_what_has_no_effect(trainer, engine.options, findings, packed=True)
    assert "fused_skip_old_logps=True has no effect, because Accelerator.backward may see" in warnings_logged()[-1]
    assert "the moment when weights move" in warnings_logged()[-1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"beta": 0.1}, "beta=0.1"),
        ({"top_entropy_quantile": 0.5}, "entropy quantile"),
        ({"fused_layout": "padded"}, "rows are not packed"),
        ({"entropy_coef": 0.1}, "entropy bonus"),
        ({"cls": OwnObjective}, "_compute_loss"),
    ],
    ids=["has an effect", "kl", "quantile", "padded", "bonus", "own objective"],
)
def test_the_log_says_why_zero_grad_sequences_are_not_left_out(tmp_path, warnings_logged, options, reason):
    if "entropy_coef" in options and trl_compat.TRL.release < (1, 8):
        pytest.skip("this TRL has no entropy bonus")
    make_trainer(tmp_path, **{"cls": FusedGRPOTrainer, **options}, fused_skip_zero_grad_sequences=True)
    logged = [line for line in warnings_logged() if line.startswith("fused_skip_zero_grad_sequences=True")]
    assert len(logged) == (reason is not None)
    assert all("has no effect, because" in line and reason in line for line in logged)


def test_use_liger_kernel_without_a_gpu_leaves_the_layers_and_fuses_the_loss(tmp_path, warnings_logged):
    stock = make_trainer(tmp_path, GRPOTrainer, max_steps=2)
    fused = make_trainer(tmp_path, config=GRPOConfig, use_liger_kernel=True, max_steps=2)
    forwards = [type(module).forward for module in fused.model.modules()]
    inputs = make_inputs()
    (loss, gradients), (fused_loss, fused_gradients) = (loss_and_gradients(t, inputs) for t in (stock, fused))
    assert relative_error(fused_loss, loss) < 1e-5
    assert all(relative_error(fused_gradients[name], gradient) < 1e-5 for name, gradient in gradients.items())
    assert fused.fused_stats.backward == "forecast"
    fused.train()
    assert [type(module).forward for module in fused.model.modules()] == forwards
    assert not [m for m in fused.model.modules() if "liger" in getattr(m.forward, "__module__", "").lower()]
    assert len([line for line in warnings_logged() if "Liger's kernels" in line]) == 1


def test_the_fused_loss_said_to_be_off_stays_off_beside_ligers_layers(tmp_path):
    """`use_liger_kernel` is then what it is in TRL: up to 1.14 TRL's own Liger loss too."""
    parts = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy")
    options = {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(parts, False), "max_steps": 2}

    def train(cls):
        trainer = make_trainer(tmp_path, cls, config=GRPOConfig, use_liger_loss=False, num_iterations=2, **options)
        trainer.train()
        return [(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one]

    stock = train(GRPOTrainer)
    assert train(FusedGRPOTrainer) == stock
    with patch():
        assert train(GRPOTrainer) == stock
        assert make_trainer(tmp_path, config=GRPOConfig, **options).use_liger_loss


def test_arguments_that_are_used_twice_keep_the_fused_loss(tmp_path):
    first = make_trainer(tmp_path, config=GRPOConfig, use_liger_kernel=True)
    second = make_trainer(tmp_path, config=lambda **_: first.args)
    assert second.use_liger_loss


def _entropies(trainer, inputs):
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 8, compute_entropy=True)[1]


@pytest.mark.parametrize("bonus", [False, True], ids=["no bonus", "bonus"])
def test_entropies_carry_a_gradient_where_stocks_do(tmp_path, bonus):
    if bonus and trl_compat.TRL.release < (1, 8):
        pytest.skip("this TRL has no entropy bonus")
    options = {"entropy_coef": 0.1} if bonus else {}
    stock, fused = (make_trainer(tmp_path, cls, **options) for cls in (GRPOTrainer, FusedGRPOTrainer))
    inputs = make_inputs()
    expected, entropies = (_entropies(trainer, inputs) for trainer in (stock, fused))
    assert entropies.requires_grad == expected.requires_grad
    counted = inputs["completion_mask"].bool()
    assert relative_error(entropies[counted], expected[counted]) < 1e-5


def _with_entropy_term(cls):
    class WithEntropyTerm(cls):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            return loss - 0.1 * (_entropies(self, inputs) * inputs["completion_mask"]).sum()

    return WithEntropyTerm


def test_an_entropy_term_of_the_users_has_the_same_gradient_as_in_stock(tmp_path):
    stock = make_trainer(tmp_path, _with_entropy_term(GRPOTrainer), config=_trl_config(), loss_type="grpo")
    fused = make_trainer(tmp_path, _with_entropy_term(FusedGRPOTrainer), loss_type="grpo")
    inputs = make_inputs()
    (loss, gradients), (fused_loss, fused_gradients) = (loss_and_gradients(t, inputs) for t in (stock, fused))
    assert relative_error(fused_loss, loss) < 1e-5
    assert all(relative_error(fused_gradients[name], gradient) < 1e-5 for name, gradient in gradients.items())


def _trl_config():
    from trl import GRPOConfig

    return GRPOConfig
