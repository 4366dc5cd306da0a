"""Reductions of `FusedLinearGRPOLoss`: how a batch is cut, what it is divided by, and what others call them."""

import pytest
import torch

from tests.oracle import relative_error
from trl_fused_grpo import FusedLinearGRPOLoss
from trl_fused_grpo.loss.objective import REDUCTION_ALIASES, REDUCTIONS

from .test_liger_loss import ADVANTAGES, HIDDEN, IDS, MASK, OLD, TEMPERATURE, WEIGHT, B, T, run


LONGEST = 12


def loss_and_gradient(rows, options, advantages=ADVANTAGES, **inputs):
    """Loss of some sequences, and its gradient in the head's weight."""
    weight = WEIGHT.clone().requires_grad_()
    loss_fn = FusedLinearGRPOLoss(beta=0.0, temperature=TEMPERATURE, max_completion_length=LONGEST, **options)
    given = (HIDDEN[rows], weight, IDS[rows], MASK[rows], advantages[rows])
    loss, _ = loss_fn(*given, old_per_token_logps=OLD[rows], **inputs)
    return loss.detach(), torch.autograd.grad(loss, weight)[0]


def cut(options, sizes, **inputs):
    """Loss and gradient, summed over micro-batches of these sizes."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [
        loss_and_gradient(slice(end - size, end), options, **inputs) for size, end in zip(sizes, ends, strict=True)
    ]
    return sum(loss for loss, _ in parts), sum(gradient for _, gradient in parts)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_with_a_normalizer_the_gradient_does_not_depend_on_how_a_batch_is_cut(reduction):
    normalizer = {"token_mean": MASK.sum(), "sum": None}.get(reduction, float(B))
    options = {"reduction": reduction, "loss_type": "sapo"}
    whole = loss_and_gradient(slice(None), options)  # which counts for itself
    for sizes in ([B], [1, 3], [2, 1, 1], [1] * B):
        for value, expected in zip(cut(options, sizes, normalizer=normalizer), whole, strict=True):
            assert relative_error(value, expected) < 1e-6


def test_with_the_tokens_of_the_step_neither_does_that_of_token_mean():
    whole = loss_and_gradient(slice(None), {"loss_type": "dapo"})
    for value, expected in zip(cut({"loss_type": "dapo"}, [1, 3], num_items_in_batch=MASK.sum()), whole, strict=True):
        assert relative_error(value, expected) < 1e-6


@pytest.mark.parametrize("reduction", [*REDUCTIONS, *REDUCTION_ALIASES])
def test_tokens_of_the_step_are_refused_where_a_reduction_does_not_divide_by_them(reduction):
    options = {"reduction": reduction, "beta": 0.0}
    if reduction == "token_mean":
        run(FusedLinearGRPOLoss, options, num_items_in_batch=77)
        return
    with pytest.raises(ValueError, match=f"by which reduction='{reduction}' does not divide: pass normalizer"):
        run(FusedLinearGRPOLoss, options, num_items_in_batch=77)


def test_tokens_of_the_step_beside_a_normalizer_are_refused():
    with pytest.raises(ValueError, match="num_items_in_batch and normalizer exclude each other"):
        run(FusedLinearGRPOLoss, {"beta": 0.0}, num_items_in_batch=77, normalizer=77.0)


@pytest.mark.parametrize("name", ["normalizer", "entropy_normalizer", "num_items_in_batch"])
def test_a_divisor_is_one_number(name):
    with pytest.raises(ValueError, match=rf"{name} has shape \[9\], but must be one number"):
        run(FusedLinearGRPOLoss, {"beta": 0.0, "entropy_coef": 0.1}, **{name: torch.ones(T)})
    run(FusedLinearGRPOLoss, {"beta": 0.0, "entropy_coef": 0.1}, **{name: torch.ones(1)})


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_step_without_tokens_has_loss_and_gradients_zero(reduction):
    inputs = {"normalizer": 0, "entropy_normalizer": torch.tensor(0)}
    options = {"reduction": reduction, "beta": 0.0, "entropy_coef": 0.1}
    _, loss, _, grads = run(FusedLinearGRPOLoss, options, mask=torch.zeros(B, T), **inputs)
    assert [loss.item(), *(grad.abs().sum().item() for grad in grads)] == [0.0] * 4


@pytest.mark.parametrize("alias", REDUCTION_ALIASES)
def test_a_name_of_another_library_is_the_reduction_that_it_names(alias):
    aliased, expected = (
        loss_and_gradient(slice(None), {"reduction": name, "loss_type": "sapo"})
        for name in (alias, REDUCTION_ALIASES[alias])
    )
    assert torch.equal(aliased[0], expected[0])
    assert torch.equal(aliased[1], expected[1])
    with pytest.raises(ValueError, match="max_completion_length must be provided"):
        run(FusedLinearGRPOLoss, {"beta": 0.0, "reduction": alias, "max_completion_length": None})


def test_an_unknown_reduction_is_answered_with_the_names_that_there_are():
    names = ", ".join(map(repr, (*REDUCTIONS, *REDUCTION_ALIASES)))
    with pytest.raises(ValueError, match=f"^Unknown reduction 'mean': expected one of {names}.$"):
        run(FusedLinearGRPOLoss, {"beta": 0.0, "reduction": "mean"})
    with pytest.raises(ValueError, match="Unknown reduction 'padded_sequence_sum'"):
        run(FusedLinearGRPOLoss, {"beta": 0.0, "reduction": "padded_sequence_sum"})


def prescaled():
    """The advantages of each token as SkyRL scales them over a batch, under the name of its `loss_reduction`."""
    advantages, lengths = ADVANTAGES[:, None].expand(B, T), MASK.sum(1, keepdim=True)
    return {
        "token_mean": advantages / MASK.sum(),
        "sequence_mean": advantages / (B * lengths),
        "seq_mean_token_sum_norm": advantages / (B * LONGEST),
    }


@pytest.mark.parametrize("name", prescaled())
def test_the_sum_over_scaled_advantages_is_the_reduction_that_they_are_scaled_for(name):
    summed = cut({"reduction": "sum"}, [1, 3], advantages=prescaled()[name])
    expected = loss_and_gradient(slice(None), {"reduction": name})
    for value, true_value in zip(summed, expected, strict=True):
        assert relative_error(value, true_value) < 1e-6
