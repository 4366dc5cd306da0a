"""`FusedLinearGRPOLoss`: what it returns, which gradients it gives, and which arguments it takes and refuses."""

from unittest import mock

import pytest
import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

from tests.oracle import relative_error
from trl_fused_grpo import FusedLinearGRPOLoss
from trl_fused_grpo.loss.objective import LOSS_TYPES

from .test_liger_loss import (
    ADVANTAGES,
    BIAS,
    HIDDEN,
    IDS,
    MASK,
    OLD,
    RATIO,
    REF,
    TEMPERATURE,
    WEIGHT,
    B,
    T,
    dense,
    run,
    skip_what_the_installed_liger_lacks,
    truth,
)


def test_a_batch_without_tokens_has_loss_and_gradients_zero():
    _, loss, metrics, grads = run(FusedLinearGRPOLoss, {"beta": 0.1}, mask=torch.zeros(B, T), ref_per_token_logps=REF)
    assert [loss.item(), *(m.item() for m in metrics), *(g.abs().sum().item() for g in grads)] == [0.0] * 6


@pytest.mark.parametrize("backward", ["auto", "forecast", "recompute"])
@pytest.mark.parametrize("shape", [(0, T), (B, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_empty_shard_has_loss_metrics_and_gradients_zero(loss_type, shape, backward):
    options = {"loss_type": loss_type, "max_completion_length": 12, "beta": 0.1, "compiled": False}
    if loss_type in ("cispo", "vespo"):
        options["off_policy_mask_threshold"] = 0.1
    leaves = [torch.ones(*shape, HIDDEN.shape[-1], requires_grad=True), WEIGHT.clone().requires_grad_()]
    per_token = torch.zeros(shape)
    arguments = *leaves, per_token.long(), per_token, ADVANTAGES[: shape[0]]
    inputs = {"ref_per_token_logps": per_token, "old_per_token_logps": per_token, "vllm_is_ratio": per_token}
    loss_fn = FusedLinearGRPOLoss(**options, backward=backward, entropy_coef=0.1)
    outputs = loss_fn(*arguments, **inputs, return_outputs=True)
    assert outputs.per_token_logps.shape == shape
    weight = outputs.metrics.pop("vespo/phi_seq_mean", None)  # one for a sequence without tokens
    assert weight in (None, float(shape[0] > 0))
    assert {metric.item() for metric in outputs.metrics.values()} == {outputs.loss.item()} == {0.0}
    for leaf, grad in zip(leaves, torch.autograd.grad(outputs.loss, leaves), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))
    if loss_type not in ("dapo", "bnpo"):  # Liger divides by the number of sequences, or of columns
        return
    loss, metrics = LigerFusedLinearGRPOLoss(**options)(*arguments, ref_per_token_logps=per_token)
    assert {loss.item(), *(metric.item() for metric in metrics)} == {0.0}


def test_without_gradients_the_mode_is_no_grad():
    loss_fn = FusedLinearGRPOLoss(beta=0.0, temperature=TEMPERATURE)
    with torch.no_grad():
        loss, _ = loss_fn(HIDDEN, WEIGHT, IDS, MASK, ADVANTAGES, BIAS)
    assert loss_fn.stats.backward == "no_grad"
    assert relative_error(loss, truth({})[0]) < 2e-6


def test_only_hidden_states_and_head_get_gradients():
    old, ref, ratio, advantages = (x.clone().requires_grad_() for x in (OLD, REF, RATIO, ADVANTAGES))
    loss_fn = FusedLinearGRPOLoss(beta=0.1, temperature=TEMPERATURE)
    weight = WEIGHT.clone().requires_grad_()
    loss, metrics = loss_fn(
        HIDDEN, weight, IDS, MASK, advantages, ref_per_token_logps=ref, old_per_token_logps=old, vllm_is_ratio=ratio
    )
    loss.backward()
    assert weight.grad is not None
    assert all(x.grad is None for x in (old, ref, ratio, advantages))
    assert not any(m.requires_grad for m in metrics)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_return_outputs_gives_logps_entropies_and_named_metrics(loss_type):
    options = {"beta": 0.1, "loss_type": loss_type, "max_completion_length": 12, "temperature": TEMPERATURE}
    inputs = {"ref_per_token_logps": REF, "old_per_token_logps": OLD}
    loss, (kl, clipped) = FusedLinearGRPOLoss(**options)(HIDDEN, WEIGHT, IDS, MASK, ADVANTAGES, BIAS, **inputs)
    outputs = FusedLinearGRPOLoss(**options)(HIDDEN, WEIGHT, IDS, MASK, ADVANTAGES, BIAS, **inputs, return_outputs=True)
    logps, entropies = dense(HIDDEN, WEIGHT, BIAS)
    counted = MASK.bool()
    assert torch.equal(outputs.loss, loss)
    assert relative_error(outputs.per_token_logps[counted], logps[counted]) < 1e-6
    assert relative_error(outputs.entropies[counted], entropies[counted]) < 1e-6
    metrics = outputs.metrics
    assert metrics["kl"] == kl
    assert metrics.get("cispo_clip_ratio", metrics.get("clip_ratio/region_mean")) == clipped
    assert ("cispo_clip_ratio" in metrics) == (loss_type == "cispo")
    if loss_type != "cispo":
        assert metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"] == pytest.approx(clipped.item())
    assert metrics["entropy"].item() == pytest.approx(entropies[counted].mean().item(), rel=1e-5)
    assert ("vespo/phi_seq_mean" in metrics) == (loss_type == "vespo")


def test_reference_logps_are_preferred_to_reference_hidden_states_with_a_warning():
    loss_fn = FusedLinearGRPOLoss(beta=0.1)
    arguments = HIDDEN, WEIGHT, IDS, MASK, ADVANTAGES
    expected, _ = loss_fn(*arguments, ref_per_token_logps=REF)
    with pytest.warns(UserWarning, match="Using ref_per_token_logps"):
        loss, _ = loss_fn(*arguments, ref_per_token_logps=REF, ref_input=HIDDEN, ref_weight=WEIGHT)
    assert torch.equal(loss, expected)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"_input": HIDDEN[:, 1:]}, r"_input has shape \[4, 8\]"),
        ({"attention_mask": MASK[1:]}, r"attention_mask has shape \[3, 9\]"),
        ({"advantages": ADVANTAGES[1:]}, r"advantages has shape \[3\].*\[4\] or \[4, 1\] or \[4, 9\]"),
        ({"old_per_token_logps": OLD[:, 1:]}, r"old_per_token_logps has shape \[4, 8\]"),
        ({"vllm_is_ratio": RATIO[:, :2]}, r"vllm_is_ratio has shape \[4, 2\]"),
        ({"selected_token_ids": IDS.flatten()}, r"token ids have shape \[36\], but need \[B, T\]"),
        ({}, "needs ref_per_token_logps"),
    ],
)
def test_input_that_does_not_fit_raises_with_its_name(inputs, message):
    names = ("_input", "lin_weight", "selected_token_ids", "attention_mask", "advantages")
    arguments = {**dict(zip(names, (HIDDEN, WEIGHT, IDS, MASK, ADVANTAGES), strict=True)), **inputs}
    with pytest.raises(ValueError, match=message):
        FusedLinearGRPOLoss()(**arguments)


@pytest.mark.parametrize("name", ["sapo_temperature_pos", "sapo_temperature_neg", "delta"])
def test_options_that_must_be_positive_raise_otherwise(name):
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        FusedLinearGRPOLoss(**{name: 0.0})


def test_attributes_set_after_construction_take_effect():
    loss_fn = FusedLinearGRPOLoss(beta=0.5)
    loss_fn.beta, loss_fn.loss_type = 0.0, "grpo"
    assert (loss_fn.objective.beta, loss_fn.objective.loss_type) == (0.0, "grpo")
    loss_fn(HIDDEN, WEIGHT, IDS, MASK, ADVANTAGES)  # beta is zero, so no reference is needed


@pytest.mark.parametrize("name", ["ref_per_token_logps", "old_per_token_logps", "sampling_per_token_logps"])
def test_log_probs_of_another_shape_are_named(name):
    with pytest.raises(ValueError, match=rf"^{name} has shape \[4, 8\], but token ids of shape \[4, 9\]"):
        run(FusedLinearGRPOLoss, {"beta": 0.1}, **{name: torch.zeros(B, T - 1)})


def test_a_temperature_and_hidden_states_of_another_shape_are_named():
    with pytest.raises(ValueError, match=r"^temperature has shape \[3\]"):
        run(FusedLinearGRPOLoss, {"use_ref_model": False, "beta": 0.0}, temperature=torch.ones(3))
    with pytest.raises(ValueError, match=r"^_input has shape \[3, 9\]"):
        run(FusedLinearGRPOLoss, {"use_ref_model": False, "beta": 0.0}, hidden=HIDDEN[:3])


def test_entropies_are_divided_by_their_own_normalizer():
    options = {"use_ref_model": False, "beta": 0.0, "entropy_coef": 0.5}
    _, plain, _, _ = run(FusedLinearGRPOLoss, {**options, "entropy_coef": 0.0})
    _, by_tokens, _, _ = run(FusedLinearGRPOLoss, options)
    _, by_ten, _, _ = run(FusedLinearGRPOLoss, options, entropy_normalizer=10.0)
    assert (by_ten - plain).item() == pytest.approx((by_tokens - plain).item() * MASK.sum().item() / 10, rel=1e-4)


@pytest.mark.parametrize("logits_mib", [None, 0.001])
def test_the_memory_of_logits_is_that_asked_for(logits_mib):
    from trl_fused_grpo.loss import selected_logps

    with mock.patch.object(
        selected_logps, "fused_linear_logps", side_effect=selected_logps.fused_linear_logps
    ) as computed:
        run(FusedLinearGRPOLoss, {"use_ref_model": False, "beta": 0.0, "logits_mib": logits_mib})
    [call] = computed.call_args_list
    assert call.kwargs["logits_mib"] == logits_mib
    assert (call.kwargs.get("group_mib") is None) == (logits_mib is not None)


def strided(tensor):
    """The same values with other strides."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


FORMS = {
    "strided": {"_input": strided(HIDDEN), "lin_weight": strided(WEIGHT), "selected_token_ids": strided(IDS)},
    "strided-by-token": {"attention_mask": strided(MASK), "old_per_token_logps": strided(OLD)},
    "int32-ids": {"selected_token_ids": IDS.int()},
    "bool-mask": {"attention_mask": MASK.bool()},
    "int-mask": {"attention_mask": MASK.long()},
    "double": {"advantages": ADVANTAGES.double(), "old_per_token_logps": OLD.double()},
    "column": {"advantages": ADVANTAGES[:, None]},
    "by-token": {"advantages": ADVANTAGES[:, None].expand(B, T)},
}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_a_tensor_does_not_matter(name):
    plain = {
        "_input": HIDDEN,
        "lin_weight": WEIGHT,
        "selected_token_ids": IDS,
        "attention_mask": MASK,
        "advantages": ADVANTAGES,
        "old_per_token_logps": OLD,
    }
    results = []
    for arguments in (plain, {**plain, **FORMS[name]}):
        leaves = {key: arguments[key].detach().requires_grad_() for key in ("_input", "lin_weight")}
        loss, _ = FusedLinearGRPOLoss(beta=0.0)(**{**arguments, **leaves})
        results.append([loss.detach(), *torch.autograd.grad(loss, [*leaves.values()])])
    for value, expected in zip(*reversed(results), strict=True):
        assert relative_error(value, expected) < 1e-6


@pytest.mark.parametrize("trained", [[0], [1], [2], [0, 1], [0, 2], [1, 2]], ids=str)
def test_what_needs_no_gradient_gets_none_and_changes_no_other(trained):
    leaves = [leaf.clone() for leaf in (HIDDEN, WEIGHT, BIAS)]
    for index in trained:
        leaves[index].requires_grad_()
    hidden, weight, bias = leaves
    loss_fn = FusedLinearGRPOLoss(beta=0.0, temperature=TEMPERATURE)
    loss_fn(hidden, weight, IDS, MASK, ADVANTAGES, bias, old_per_token_logps=OLD)[0].backward()
    truths = truth({}, factor=1.0, old=OLD)[2]
    assert [index for index, leaf in enumerate(leaves) if leaf.grad is not None] == trained
    for index in trained:
        assert relative_error(leaves[index].grad, truths[index]) < 3e-6


@pytest.mark.parametrize("advantages", [ADVANTAGES, ADVANTAGES[:, None]], ids=["per-sequence", "one-column"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_completions_of_one_token_are_as_ligers(loss_type, advantages):
    options = {"loss_type": loss_type, "max_completion_length": 12, "temperature": TEMPERATURE}
    skip_what_the_installed_liger_lacks({**options, "importance_sampling_level": "token"}, {})
    results = []
    for cls, given in ((FusedLinearGRPOLoss, advantages), (LigerFusedLinearGRPOLoss, ADVANTAGES)):
        leaves = [HIDDEN[:, :1].clone().requires_grad_(), WEIGHT.clone().requires_grad_()]
        loss_fn = cls(beta=0.0, use_ref_model=False, compiled=False, **options)
        loss, _ = loss_fn(*leaves, IDS[:, :1], MASK[:, :1], given, BIAS, old_per_token_logps=OLD[:, :1])
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for value, expected in zip(*results, strict=True):
        assert relative_error(value, expected) < 1e-5
