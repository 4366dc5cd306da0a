"""
`FusedRLOOTrainer` against TRL's `RLOOTrainer`: whole trainings from the same weights. `tests.harness` has more.
"""

import pickle

import pytest
import torch
import trl
from peft import LoraConfig
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.tiny_training import loss_and_gradients, make_trainer
from trl_fused_grpo import FusedRLOOConfig, FusedRLOOTrainer, fuse, fuse_config, patch
from trl_fused_grpo._compat.trainers import trl_class
from trl_fused_grpo._compat.trl import COMPUTES_LOGPS_OF_PADDING
from trl_fused_grpo.loss.batch import GRPOBatch
from trl_fused_grpo.loss.forecast import BatchForecast, forecast, grad_rows_first
from trl_fused_grpo.loss.objective import rloo_objective
from trl_fused_grpo.parity.case import Batch, Case
from trl_fused_grpo.parity.tiny.batches import make_data
from trl_fused_grpo.training.findings import Findings, Level, replaced_objective
from trl_fused_grpo.training.requests import DEFERRED


TIMES = ("runtime", "per_second", "step_time")
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
STEPS = {"gradient_accumulation_steps": 2, "max_steps": 3}


def train(folder, cls, **options):
    """A trainer that has trained, how its weights moved, and what it logged without times."""
    config = RLOOConfig if cls is RLOOTrainer else FusedRLOOConfig
    options = {"optim": "sgd", "learning_rate": 0.05, "max_completion_length": 6, **options}
    torch.manual_seed(0)  # of adapters
    trainer = make_trainer(folder, cls, config=config, **options)
    _generate_in_several_lengths(trainer)
    start = {name: value.detach().clone() for name, value in trainer.model.named_parameters() if value.requires_grad}
    torch.manual_seed(0)
    trainer.train()
    weights = dict(trainer.model.named_parameters())
    moved = {name: weights[name].detach() - value for name, value in start.items()}
    log = [
        {name: value for name, value in entry.items() if not name.endswith(TIMES) and not name.startswith("fused/")}
        for entry in trainer.state.log_history
    ]
    return trainer, moved, log


def _generate_in_several_lengths(trainer):
    """The tiny models hardly ever end a completion: end each after a length of its own."""
    generate = trainer._generate_single_turn

    def shortened(*args):
        result = generate(*args)
        completions = result[1] if isinstance(result, tuple) else result  # TRL 0.27 returns the prompts too
        short = [ids[: 1 + (7 * i) % 5] for i, ids in enumerate(completions)]
        return (result[0], short) if isinstance(result, tuple) else short

    trainer._generate_single_turn = shortened


def assert_same_training(expected, outcome):
    (stock, expected_moved, expected_log), (_, moved, log) = expected, outcome
    size = sum(change.square().sum() for change in expected_moved.values()) ** 0.5
    difference = sum((moved[name] - change).square().sum() for name, change in expected_moved.items()) ** 0.5
    weights = sum(p.detach().square().sum() for p in stock.model.parameters() if p.requires_grad) ** 0.5
    rounding = torch.finfo(torch.float32).eps * weights  # of the weights themselves, in each step of both trainings
    assert size > 100 * rounding
    assert difference < 1e-5 * size + rounding
    assert [entry.keys() for entry in log] == [entry.keys() for entry in expected_log]
    for entry, values in zip(log, expected_log, strict=True):
        # A loss adds up to about zero, and so may a KL: relative to the terms, advantages and log-probs, of size 5
        sums = {name: entry.pop(name) for name in ("loss", "train_loss", "kl") if name in entry}
        assert sums == pytest.approx({name: values.pop(name) for name in sums}, rel=1e-5, abs=5e-5)
        assert entry == pytest.approx(values, rel=1e-5, abs=1e-6)


SETTINGS = {
    "on-policy": {"beta": 0.0, **STEPS},
    "two iterations": {"beta": 0.0, "num_iterations": 2, **STEPS},
    "reference": {"beta": 0.1, **STEPS},
    "LoRA": {"beta": 0.1, "peft_config": LORA, "gradient_checkpointing": True, **STEPS},
    "zero-grad sequences": {
        "beta": 0.0,
        "steps_per_generation": 4,
        "temperature": 0.7,
        "normalize_advantages": True,
        "fused_skip_zero_grad_sequences": True,
        **STEPS,
    },
    "recomputed": {"beta": 0.0, "steps_per_generation": 4, "fused_backward": "recompute", **STEPS},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_it_trains_as_stock(tmp_path, options):
    own = {name: value for name, value in options.items() if not name.startswith("fused_")}
    expected, outcome = train(tmp_path, RLOOTrainer, **own), train(tmp_path, FusedRLOOTrainer, **options)
    assert_same_training(expected, outcome)
    trainer = outcome[0]
    shares = [entry["fused/rows_recomputed"] for entry in trainer.state.log_history if "fused/rows_recomputed" in entry]
    assert len(shares) == 3
    assert trainer.fused_layout() == "packed"
    assert trainer.fused_stats.rows > 0
    assert "fused_backward" in options or max(shares) == 0  # as forecast


def test_images_train_as_stock(tmp_path):
    grpo = make_trainer(tmp_path, GRPOTrainer, kind="llava", per_device_train_batch_size=6, num_generations=3)
    case = Case("images", "a micro-batch with images", data=Batch(images="patch-pixels"), model="llava")
    inputs = make_data(case, grpo, seed=0)[0]
    drift = torch.tensor([0.1, -0.1, 0.5, 0.0, -0.4, 0.1])
    inputs["old_logps"] = -5.5 * inputs["completion_mask"].sum(1) + drift
    stock, trainer = (
        make_trainer(tmp_path, cls, config=config, kind="llava", beta=0.0)
        for cls, config in ((RLOOTrainer, RLOOConfig), (FusedRLOOTrainer, FusedRLOOConfig))
    )
    (expected_loss, expected), (loss, gradients) = (loss_and_gradients(one, inputs) for one in (stock, trainer))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    size = sum(gradient.square().sum() for gradient in expected.values()) ** 0.5
    difference = sum((gradients[name] - gradient).square().sum() for name, gradient in expected.items()) ** 0.5
    assert difference < 1e-5 * size
    assert trainer.fused_stats.rows > 0


@pytest.mark.any_trl
@pytest.mark.parametrize("has_old", [True, False])
def test_the_forecast_is_the_gradient_of_the_loss_in_float64(has_old):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 1, 7, 3, 0, 6])
    mask = (torch.arange(7) < lengths[:, None]).double()
    logps = (-torch.rand(6, 7, generator=generator, dtype=torch.float64) * mask).requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.0, 1.0, -1.0]).double()
    off = torch.tensor([0.1, -0.3, 0.5, 0.2, 0.0, -0.1]).double()  # of which the second and third are clipped
    sums = (logps * mask).sum(1)
    old = (sums.detach() - off) if has_old else None
    ratio = (sums - (sums.detach() if old is None else old)).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    (expected,) = torch.autograd.grad(loss, logps)
    old = None if old is None else old[:, None]
    found = forecast(rloo_objective(0.2, 0.2), GRPOBatch(mask, advantages[:, None], old))
    positions, count = grad_rows_first(mask.bool(), found.needs_grad)
    rows = found.at(positions, count)
    grads, _ = rows(slice(0, count), logps.detach().flatten()[positions[:count]], None)
    torch.testing.assert_close(
        grads.double() / found.unit.double(), expected.flatten()[positions[:count]], rtol=1e-6, atol=1e-9
    )
    assert not expected.flatten()[positions[count:]].any()
    assert (expected[1] == 0).all() == has_old
    both = BatchForecast.joined([found, found])
    assert len(both.needs_grad) == 12


def test_on_policy_without_a_penalty_no_old_logps_are_computed(tmp_path, unchecked, monkeypatch):
    def forwards_without_gradient(beta):
        trainer = make_trainer(tmp_path, FusedRLOOTrainer, config=FusedRLOOConfig, max_steps=2, beta=beta)
        compute, calls = trainer._fused.engine.compute, []
        monkeypatch.setattr(
            trainer._fused.engine, "compute", lambda *a, **k: calls.append(torch.is_grad_enabled()) or compute(*a, **k)
        )
        trainer.train()
        return calls.count(False)

    assert forwards_without_gradient(0.0) == 0
    assert forwards_without_gradient(0.1) == 4


def test_a_training_that_goes_on_computes_the_old_logps_that_were_left_out(tmp_path):
    trainer = make_trainer(tmp_path, FusedRLOOTrainer, config=FusedRLOOConfig, beta=0.0, **STEPS)
    window = trainer._fused.window
    window.begin(epoch=object())
    window.is_in_step = window.is_in_train = True
    trainer.current_gradient_accumulation_steps = 2
    trainer.accelerator.gradient_state._set_sync_gradients(False)
    trainer.model.train()
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    window.is_in_step = False
    batches = trainer._buffered_inputs
    assert all(DEFERRED in batch and "old_logps" not in batch for batch in batches)
    trainer._step += 1
    trainer._fused.old_logps.resolve()
    assert DEFERRED not in batches[1]
    assert batches[1]["old_logps"].shape == (4,)
    assert (batches[1]["old_logps"] < -1).all()


def test_fuse_and_patch_know_it(tmp_path):
    assert fuse(RLOOTrainer) is FusedRLOOTrainer is fuse(FusedRLOOTrainer)
    assert fuse_config(RLOOConfig) is FusedRLOOConfig
    assert issubclass(FusedRLOOConfig, RLOOConfig)
    args = FusedRLOOConfig(output_dir=str(tmp_path), fused_layout="padded", use_cpu=True, bf16=False)
    assert args.beta == RLOOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False).beta
    assert pickle.loads(pickle.dumps(args)).fused_layout == "padded"
    with patch():
        assert trl.RLOOTrainer is FusedRLOOTrainer
        assert make_trainer(tmp_path, RLOOTrainer, config=RLOOConfig).use_liger_loss
        said = make_trainer(tmp_path, RLOOTrainer, config=RLOOConfig, use_liger_loss=False)
        assert type(said) is RLOOTrainer
    assert trl.RLOOTrainer is RLOOTrainer
    assert type(make_trainer(tmp_path, RLOOTrainer, config=RLOOConfig)) is RLOOTrainer


def test_a_loss_of_the_users_is_seen(tmp_path):
    class Twice(RLOOTrainer):
        def _compute_loss(self, model, inputs):
            return 2 * super()._compute_loss(model, inputs)

    assert trl_class(fuse(Twice)) is RLOOTrainer
    trainer = make_trainer(tmp_path, fuse(Twice), config=FusedRLOOConfig, beta=0.0)
    assert replaced_objective(trainer) == "Twice._compute_loss"
    assert trainer._fused.look().level == (Level.HEAD if COMPUTES_LOGPS_OF_PADDING else Level.ROWS)
    plain = make_trainer(tmp_path, FusedRLOOTrainer, config=FusedRLOOConfig, beta=0.0)
    assert replaced_objective(plain) is None
    assert plain._fused.look() == Findings()
