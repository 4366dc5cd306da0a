"""`FusedLinearGRPOLoss` of an `LMHead`: scale, softcap and LoRA against a dense float64 oracle."""

import pytest
import torch

from tests.grpo_oracle import grpo_loss
from tests.oracle import dense_logps, relative_error
from trl_fused_grpo import FusedLinearGRPOLoss, LMHead
from trl_fused_grpo.ops.lm_head import LowRank

from .test_liger_loss import ADVANTAGES, BIAS, HIDDEN, IDS, MASK, TEMPERATURE, WEIGHT, B, H, T, V, randn


A, LORA_B, LORA_SCALE = randn(3, H, seed=21), 0.3 * randn(V, 3, seed=22), 1.5


def head_of(weight, bias, a, b, **options):
    return LMHead(weight, bias, low_rank=(LowRank(a, b, LORA_SCALE),), **options)


def leaves_of(dtype=torch.float32):
    return [x.to(dtype).clone().requires_grad_() for x in (HIDDEN, WEIGHT, BIAS, A, LORA_B)]


def dense(options, hidden, weight, bias, a, b):
    """Dense log-probs and entropies `[B, T]` of a head with these options."""
    merged = weight + LORA_SCALE * b @ a
    values = dense_logps(hidden.flatten(0, 1), merged, IDS.flatten(), bias, TEMPERATURE, **options)
    return [value.view(B, T) for value in values]


def log_probs(options):
    """Those of old policy and reference, which are not far from the policy's."""
    current = dense(options, *leaves_of())[0].detach()
    return current + 0.4 * randn(B, T, seed=5), current + 0.5 * randn(B, T, seed=6)


def truth(options, loss_options, old, ref=None):
    """The dense loss and its gradients in float64."""
    leaves = leaves_of(torch.float64)
    logps, entropies = dense(options, *leaves)
    loss_options = {"loss_type": "dapo", **loss_options}
    loss, _ = grpo_loss(loss_options, logps, MASK, ADVANTAGES, entropies=entropies, old=old, ref=ref)
    return loss.detach(), torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("backward", ["auto", "recompute"])
@pytest.mark.parametrize("loss_options", [{}, {"loss_type": "grpo", "beta": 0.1, "entropy_coef": 0.1}], ids=["", "kl"])
@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.5}, {"logit_scale": 2.0, "softcap": 3.0}], ids=str)
def test_loss_and_all_gradients_of_a_head_are_those_of_dense_logits(options, loss_options, backward):
    hidden, *head = leaves = leaves_of()
    loss_fn = FusedLinearGRPOLoss(**{"beta": 0.0, **loss_options}, temperature=TEMPERATURE, backward=backward)
    old, ref = log_probs(options)
    inputs = {"old_per_token_logps": old, "ref_per_token_logps": ref}
    loss, _ = loss_fn(hidden, head_of(*head, **options), IDS, MASK, ADVANTAGES, **inputs)
    expected, truths = truth(options, loss_options, old, ref)
    assert relative_error(loss.detach(), expected) < 3e-6
    for grad, true_grad in zip(torch.autograd.grad(loss, leaves), truths, strict=True):
        assert relative_error(grad, true_grad) < 3e-6
    if backward == "auto":
        assert loss_fn.stats.recomputed == 0


def test_a_head_whose_weight_is_frozen_trains_its_adapter():
    hidden, weight, bias, a, b = leaves_of()
    head = head_of(weight.detach(), bias.detach(), a, b)
    old, _ = log_probs({})
    loss_fn = FusedLinearGRPOLoss(beta=0.0, temperature=TEMPERATURE)
    loss_fn(hidden, head, IDS, MASK, ADVANTAGES, old_per_token_logps=old)[0].backward()
    truths = truth({}, {}, old)[1]
    for leaf, true_grad in zip((hidden, a, b), (truths[0], *truths[3:]), strict=True):
        assert relative_error(leaf.grad, true_grad) < 3e-6
    assert weight.grad is bias.grad is None


def test_the_head_of_a_reference_may_be_one_too():
    loss_fn, arguments = FusedLinearGRPOLoss(beta=0.1, temperature=TEMPERATURE), (IDS, MASK, ADVANTAGES)
    head = head_of(*leaves_of()[1:], softcap=3.0)
    reference = dense({"softcap": 3.0}, *leaves_of())[0].detach()
    expected, _ = loss_fn(HIDDEN, WEIGHT, *arguments, ref_per_token_logps=reference)
    loss, _ = loss_fn(HIDDEN, WEIGHT, *arguments, ref_input=HIDDEN, ref_weight=head)
    assert relative_error(loss, expected) < 1e-6


@pytest.mark.parametrize("names", [("lin_weight", "bias"), ("ref_weight", "ref_bias")])
def test_a_bias_beside_a_head_is_refused(names):
    given = {"lin_weight": WEIGHT, "ref_input": HIDDEN, "ref_weight": WEIGHT, names[0]: LMHead(WEIGHT), names[1]: BIAS}
    with pytest.raises(ValueError, match="An LMHead holds the bias"):
        FusedLinearGRPOLoss(beta=0.1)(
            HIDDEN, selected_token_ids=IDS, attention_mask=MASK, advantages=ADVANTAGES, **given
        )
