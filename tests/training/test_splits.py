"""How a generation batch is split into micro-batches does not matter where it does not in stock."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.distributed.rollouts import drawn, shuffled_alike
from tests.oracle import relative_error
from tests.tiny_training import make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat.required import TRANSFORMERS


ROWS = 12
SPLITS = (1, 3, 4, 12)
TOLERANCE = 1e-5  # relative, float32
SEQUENCES = {"importance_sampling_level": "sequence"}

# Sums over all rows, divided by what the generation batch has
SUMS: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "dapo with a KL term": {"loss_type": "dapo", "beta": 0.3},
    "grpo": {"loss_type": "grpo"},
    "grpo with ratios of sequences": {"loss_type": "grpo", **SEQUENCES},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo"},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", **SEQUENCES},
    "vespo": {"loss_type": "vespo"},
}
# What divides by the tokens of each micro-batch, or chooses among them
OF_MICRO_BATCHES: dict[str, dict[str, Any]] = {
    "bnpo": {"loss_type": "bnpo"},
    "an entropy quantile": {"loss_type": "dapo", "top_entropy_quantile": 0.4},
    "an entropy bonus": {"loss_type": "dapo", "entropy_coef": 0.1},
}
# How many micro-batches share a forward of the model: none, all, some
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"fused_max_tokens_per_forward": 0},
    "shared": {"fused_max_tokens_per_forward": 10_000},
    "grouped": {"fused_max_tokens_per_forward": 60},
}
SHORT = {("dapo", 3, "shared"), ("grpo", 12, "alone"), ("grpo", 12, "grouped"), ("bnpo", 4, "shared")}
Trained = tuple[dict[str, torch.Tensor], dict[str, float]]


class Gradients(TrainerCallback):
    """Keeps the gradients that the optimizer gets."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def each(losses: dict[str, dict[str, Any]]) -> pytest.MarkDecorator:
    """Once for each loss, split and way; most of them at night."""
    cases = [(name, split, way) for name in losses for split in SPLITS for way in WAYS]
    return pytest.mark.parametrize(
        ("name", "split", "way"),
        [
            pytest.param(*case, id=", ".join(map(str, case)), marks=() if case in SHORT else pytest.mark.nightly)
            for case in cases
        ],
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[..., Trained]:
    """The gradients of one step on a generation batch that is always the same, and what was logged."""
    folder = tmp_path_factory.mktemp("splits")

    @cache
    def of(name: str, split: int, way: str | None = None) -> Trained:
        options = {"beta": 0.0, **{**SUMS, **OF_MICRO_BATCHES}[name]}
        trainer = make_trainer(
            folder,
            GRPOTrainer if way is None else FusedGRPOTrainer,
            per_device_train_batch_size=ROWS // split,
            gradient_accumulation_steps=split,
            num_generations=3,
            max_steps=1,
            max_grad_norm=1e9,
            **options,
            **({} if way is None else WAYS[way]),
        )
        gradients = Gradients()
        trainer.add_callback(gradients)
        with drawn(trainer.processing_class), shuffled_alike(ROWS, split, rank=0, processes=1):
            trainer.train()
        return gradients.kept, next(entry for entry in trainer.state.log_history if "loss" in entry)

    return of


def skip_unknown(options: dict[str, Any]) -> None:
    if not options.keys() <= GRPOConfig.__dataclass_fields__.keys():
        pytest.skip("this TRL has no such option")
    if options["loss_type"] not in GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]:
        pytest.skip("this TRL has no such loss")


def distance(gradients: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    assert gradients.keys() == others.keys()
    return max(relative_error(value, others[name]) for name, value in gradients.items())


@each(SUMS)
def test_the_gradient_is_that_of_one_micro_batch(name, split, way, trained):
    """Stock's own is too, but where transformers divides the loss by the accumulation steps once more."""
    skip_unknown(SUMS[name])
    (fused, _), (stock, _), (whole, _) = trained(name, split, way), trained(name, split), trained(name, 1)
    times = split if TRANSFORMERS.release[:2] == (5, 3) else 1
    assert distance({name: times * value for name, value in stock.items()}, whole) <= TOLERANCE
    assert distance(fused, stock) <= TOLERANCE


@each(OF_MICRO_BATCHES)
def test_a_gradient_that_depends_on_the_split_is_stocks(name, split, way, trained):
    skip_unknown(OF_MICRO_BATCHES[name])
    (fused, _), (stock, _), (whole, _) = trained(name, split, way), trained(name, split), trained(name, 1)
    assert split == 1 or distance(stock, whole) > 100 * TOLERANCE
    assert distance(fused, stock) <= TOLERANCE


@each({**SUMS, **OF_MICRO_BATCHES})
def test_metrics_are_counted_once(name, split, way, trained):
    """Those of the rows, and means over micro-batches."""
    skip_unknown({**SUMS, **OF_MICRO_BATCHES}[name])
    (_, log), (_, stock) = trained(name, split, way), trained(name, split)
    assert log.keys() - stock.keys() == {"fused/rows_recomputed"}
    expected = {metric: value for metric, value in stock.items() if metric != "step_time"}
    assert {metric: log[metric] for metric in expected} == pytest.approx(expected, rel=TOLERANCE, abs=1e-6)
