"""Micro-batches that share a pass of the model: which do, and that nothing but the number of forwards changes."""

import logging
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_fused_grpo import FusedGRPOTrainer, _trl_compat
from trl_fused_grpo.dealing import prompt_numbers
from trl_fused_grpo.forecast import BatchForecast
from trl_fused_grpo.passes import ENOUGH_TOKENS, pass_ends, token_limit
from trl_fused_grpo.question import ask_for_loss
from trl_fused_grpo.window import why_passes_are_not_shared

from .oracle import relative_error
from .tiny_training import make_inputs, make_trainer


PLENTY = 10_000


@pytest.fixture
def warnings_logged(caplog):
    """How often a warning that begins so was logged in this test."""
    type(logging.getLogger()).warning_once.cache_clear()
    return lambda start: sum(record.message.startswith(start) for record in caplog.records)


def train(tmp_path, cls=FusedGRPOTrainer, **options):
    """Train on what the model generates; weights, logs, and the rows of the input of every forward with gradient."""
    options = {"max_steps": 2, "gradient_accumulation_steps": 4, "optim": "sgd", "learning_rate": 0.1, **options}
    trainer = make_trainer(tmp_path, cls, **options)
    forwards = []

    def count(module, args, output):
        if torch.is_grad_enabled():
            forwards.append(tuple(output.shape[:2]))

    trainer.model.get_input_embeddings().register_forward_hook(count)
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return weights, [entry for entry in trainer.state.log_history if "grad_norm" in entry], forwards


def assert_same_training(ours, theirs, metrics=("loss", "grad_norm")):
    (weights, log, _), (expected, expected_log, _) = ours, theirs
    for name, weight in expected.items():
        assert relative_error(weights[name], weight) < 1e-5, name
    for entry, stock_entry in zip(log, expected_log, strict=True):
        for name in metrics:
            assert entry[name] == pytest.approx(stock_entry[name], rel=1e-4, abs=1e-6), name
        assert entry.keys() - stock_entry.keys() <= {"fused/rows_recomputed"}


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo"},
        {"loss_type": "bnpo"},
        {"loss_type": "grpo", "beta": 0.1},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "dapo", "top_entropy_quantile": 0.5},
        {"loss_type": "dapo", "num_iterations": 2, "max_steps": 4},
        {"loss_type": "bnpo", "gradient_checkpointing": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_window_in_one_pass_trains_and_logs_what_stock_does(tmp_path, options):
    stock = train(tmp_path, GRPOTrainer, **options)
    ours = train(tmp_path, fused_pass_tokens=PLENTY, **options)
    means = ("entropy", "clip_ratio/region_mean", *(("kl",) if "beta" in options else ()))
    assert_same_training(ours, stock, ("loss", "grad_norm", *means))
    passes = len(stock[1])
    assert len(stock[2]) == 4 * passes
    assert len(ours[2]) == passes


@pytest.fixture(scope="module")
def stock_and_ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return [make_trainer(folder, cls, gradient_accumulation_steps=3) for cls in (GRPOTrainer, FusedGRPOTrainer)]


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.lists(st.integers(0, 8), min_size=2, max_size=2), min_size=3, max_size=3),
    prompts=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    off_policy=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_pass_of_rows_of_any_length_has_the_gradients_of_its_micro_batches(
    stock_and_ours, lengths, prompts, off_policy, seed
):
    stock, ours = stock_and_ours
    batches = [make_inputs(rows=2, seed=seed + number) for number in range(3)]
    some_prompts = torch.randint(3, 1000, (3, 3), generator=torch.Generator().manual_seed(seed))
    for number, (batch, row_lengths) in enumerate(zip(batches, lengths, strict=True)):
        batch["completion_mask"] = (torch.arange(8) < torch.tensor(row_lengths)[:, None]).long()
        batch["prompt_ids"] = some_prompts[prompts[2 * number : 2 * number + 2]]
        batch["prompt_mask"] = torch.ones(2, 3, dtype=torch.long)
        batch["num_items_in_batch"] = torch.tensor(max(sum(map(sum, lengths)), 1))  # older TRL divides by it
        if off_policy:
            batch["old_per_token_logps"] = torch.full((2, 8), -6.9)

    def loss_and_gradients(trainer, loss_of):
        trainer.model.train()
        trainer.model.zero_grad()
        trainer.current_gradient_accumulation_steps = 3
        loss = loss_of()
        loss.backward()
        return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])

    def stock_loss():
        return sum(stock.compute_loss(stock.model, dict(batch)) for batch in batches)

    loss, gradients = loss_and_gradients(ours, lambda: ours._loss_of_pass(ours.model, batches))
    expected_loss, expected = loss_and_gradients(stock, stock_loss)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    assert (gradients - expected).norm() <= 1e-5 * expected.norm()


def test_zero_tokens_run_every_micro_batch_alone(tmp_path):
    together, alone = (train(tmp_path, fused_pass_tokens=tokens) for tokens in (PLENTY, 0))
    assert len(alone[2]) == 4 * len(together[2])
    assert_same_training(alone, together)


@pytest.mark.parametrize(
    ("accumulation", "generation", "forwards"),
    [(2, 4, 4), (4, 2, 8), (1, 4, 4)],
    ids=["two-windows", "two-generations", "no-accumulation"],
)
def test_a_pass_ends_with_the_window_and_with_the_generation_batch(tmp_path, accumulation, generation, forwards):
    options = {
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": generation,
        "max_steps": 4,
    }
    ours = train(tmp_path, fused_pass_tokens=PLENTY, **options)
    assert_same_training(ours, train(tmp_path, GRPOTrainer, **options))
    assert len(ours[2]) == forwards


def test_the_last_window_of_an_epoch_may_be_short(tmp_path):
    """Sixteen generation batches an epoch, of which three make a window: the last has one."""
    options = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3, "steps_per_generation": 1}
    stock = train(tmp_path, GRPOTrainer, **options)
    assert len(stock[2]) % 3 != 0
    assert_same_training(train(tmp_path, fused_pass_tokens=PLENTY, **options), stock)


def test_an_evaluation_within_a_window_leaves_alone_what_waits(tmp_path):
    class EvaluateOnce(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            waiting = list(trainer._waiting)
            assert waiting
            trainer.evaluate()
            assert trainer._waiting == waiting

    def make(cls=FusedGRPOTrainer, **options):
        options |= {"gradient_accumulation_steps": 2, "max_steps": 1, "optim": "sgd", "learning_rate": 0.1}
        return make_trainer(tmp_path, cls, **options)

    stock = make(GRPOTrainer)
    stock.train()
    trainer = make(fused_pass_tokens=PLENTY)
    trainer.add_callback(EvaluateOnce())
    trainer.train()
    for (name, weight), expected in zip(trainer.model.named_parameters(), stock.model.parameters(), strict=True):
        assert relative_error(weight.detach(), expected.detach()) < 1e-5, name


def test_nothing_waits_from_a_training_that_was_interrupted(tmp_path):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=4, max_steps=1, fused_pass_tokens=PLENTY)
    stale = make_inputs()
    trainer._waiting = [stale]
    seen = []
    loss_of_pass = trainer._loss_of_pass
    trainer._loss_of_pass = lambda model, batches: seen.append(batches) or loss_of_pass(model, batches)
    trainer.train()
    assert [len(batches) for batches in seen] == [4]
    assert not any(batch is stale for batch in seen[0])


def test_a_loss_of_ones_own_gets_every_micro_batch(tmp_path):
    class Doubled(FusedGRPOTrainer):
        def compute_liger_loss(self, model, inputs):
            return 2 * super().compute_liger_loss(model, inputs)

    plain = train(tmp_path, fused_pass_tokens=PLENTY, learning_rate=0.1, max_grad_norm=1e9)
    doubled = train(tmp_path, Doubled, fused_pass_tokens=PLENTY, learning_rate=0.05, max_grad_norm=1e9)
    assert len(doubled[2]) == 4 * len(plain[2])
    assert doubled[1][0]["grad_norm"] == pytest.approx(2 * plain[1][0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("layout", ["aligned", "host"])
def test_padded_rows_share_no_pass(tmp_path, layout, warnings_logged):
    _, _, forwards = train(tmp_path, fused_layout=layout, fused_pass_tokens=PLENTY)
    assert len(forwards) == 8
    assert warnings_logged("fused_pass_tokens has no effect") == 1


def test_what_was_asked_for_in_vain_is_said_once_and_what_was_not_is_not(tmp_path, warnings_logged):
    train(tmp_path, fused_layout="aligned", fused_balance=True, loss_type="bnpo")
    assert warnings_logged("fused_balance has no effect, because bnpo") == 1
    assert warnings_logged("fused_pass_tokens") == 0


def test_micro_batches_that_are_not_the_hosts_own_do_not_wait(tmp_path):
    class Copying(FusedGRPOTrainer):
        def _prepare_inputs(self, generation_batch):
            return dict(super()._prepare_inputs(generation_batch))

    assert len(train(tmp_path, Copying, fused_pass_tokens=PLENTY)[2]) == 8


def test_what_depends_on_the_window_or_the_batch_shares_no_pass(tmp_path):
    trainer = make_trainer(tmp_path)
    assert why_passes_are_not_shared(trainer) is None
    trainer._entropy_bonus_enabled = True
    assert "entropy bonus" in str(why_passes_are_not_shared(trainer))
    trainer._entropy_bonus_enabled, trainer.aux_loss_enabled = False, True
    assert "auxiliary loss" in str(why_passes_are_not_shared(trainer))

    class Own(FusedGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    assert "subclass" in str(why_passes_are_not_shared(make_trainer(tmp_path, Own)))


def test_negative_tokens_are_refused(tmp_path):
    with pytest.raises(ValueError, match="fused_pass_tokens"):
        make_trainer(tmp_path, fused_pass_tokens=-1)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 3)),
    limit=st.integers(0, 90),
    shares=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_passes_hold_as_many_micro_batches_as_the_limit_allows(shape, limit, shares, seed):
    count, rows = shape
    batches = [make_inputs(rows=rows, seed=seed + number) for number in range(count)]
    for batch in batches[1:]:
        batch["prompt_ids"], batch["prompt_mask"] = batches[0]["prompt_ids"], batches[0]["prompt_mask"]
    ends = pass_ends(batches, limit, shares)

    def tokens(start, end):
        ids, masks, completions = (
            torch.cat([batch[name] for batch in batches[start : end + 1]])
            for name in ("prompt_ids", "prompt_mask", "completion_mask")
        )
        keys = prompt_numbers(ids, masks) if shares else range(len(ids))
        return int(completions.sum()) + sum(dict(zip(keys, masks.sum(1).tolist(), strict=True)).values())

    for start, end in enumerate(ends):
        assert start <= end < count
        assert end == start or tokens(start, end) <= limit
        assert end == count - 1 or tokens(start, end + 1) > limit


def test_a_pass_has_no_more_tokens_than_the_padded_micro_batch_or_than_is_enough():
    assert token_limit([make_inputs(rows=5)]) == 5 * (3 + 8)
    wide = SimpleNamespace(numel=lambda: ENOUGH_TOKENS)
    assert token_limit([{"prompt_ids": wide, "completion_ids": wide}]) == ENOUGH_TOKENS


def test_joined_forecasts_keep_the_proportions_of_their_losses(tmp_path):
    """Each is scaled by a power of two of its own; under bnpo a micro-batch with few tokens weighs them the more."""
    trainer = make_trainer(tmp_path, loss_type="bnpo", gradient_accumulation_steps=2)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    batches = [make_inputs(rows=rows, seed=rows) for rows in (1, 6)]
    forecasts = [ask_for_loss(trainer, batch, skip_dead=False).forecast for batch in batches]
    joined = BatchForecast.joined(forecasts)
    true = []
    for batch in batches:
        logps = torch.zeros(batch["completion_mask"].shape, requires_grad=True)
        trainer._get_per_token_logps_and_entropies = lambda *args, logps=logps, **kwargs: (
            (logps, torch.zeros_like(logps)) + (None,) * _trl_compat.SEAM_RETURNS_AUX_LOSS
        )
        (gradient,) = torch.autograd.grad(trainer._compute_loss(trainer.model, batch), logps)
        true.append(gradient)
    assert forecasts[0].unit != forecasts[1].unit
    for number, (start, end) in enumerate([(0, 1), (1, 7)]):
        expected = true[number] * joined.unit
        torch.testing.assert_close(joined.terms.on_policy[start:end], expected, rtol=1e-6, atol=0.0)
