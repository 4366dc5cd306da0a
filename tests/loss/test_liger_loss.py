"""`FusedLinearGRPOLoss` against Liger's loss, and against a float64 oracle for options that Liger lacks."""

import inspect

import pytest
import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

from tests.grpo_oracle import grpo_loss
from tests.oracle import dense_logps, relative_error
from trl_fused_grpo import FusedLinearGRPOLoss
from trl_fused_grpo.loss.objective import KL_ESTIMATORS, LOSS_TYPES


B, T, H, V = 4, 9, 17, 53


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HIDDEN, WEIGHT, BIAS = randn(B, T, H), 0.3 * randn(V, H, seed=1), randn(V, seed=2)
IDS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(3))
MASK = (torch.arange(T) < torch.tensor([9, 4, 1, 6])[:, None]).float()
MASK[0, 3] = 0
ADVANTAGES = torch.tensor([1.4, -0.5, 0.3, -0.2])  # advantages that do not cancel in the loss
RATIO = 0.2 + torch.rand(B, T, generator=torch.Generator().manual_seed(4))
TEMPERATURE = 0.8


def dense(hidden, weight, bias):
    logps, entropies = dense_logps(hidden.flatten(0, 1), weight, IDS.flatten(), bias, TEMPERATURE)
    return logps.view(B, T), entropies.view(B, T)


CURRENT = dense(HIDDEN, WEIGHT, BIAS)[0]
OLD, REF = CURRENT + 0.4 * randn(B, T, seed=5), CURRENT + 0.5 * randn(B, T, seed=6)


def run(cls, options, bias=True, factor=4.0, hidden=HIDDEN, mask=MASK, advantages=ADVANTAGES, **inputs):
    """Return the loss object, loss, metrics, and gradients of hidden states, weight and bias."""
    leaves = [x.clone().requires_grad_() for x in (hidden, WEIGHT, BIAS) if bias or x is not BIAS]
    loss_fn = cls(**{"temperature": TEMPERATURE, "max_completion_length": 12, "compiled": False, **options})
    loss, metrics = loss_fn(*leaves[:2], IDS, mask, advantages, leaves[2] if bias else None, **inputs)
    return loss_fn, loss.detach(), metrics, torch.autograd.grad(loss * factor, leaves)


def truth(options, factor=4.0, mask=MASK, advantages=ADVANTAGES, **inputs):
    """The oracle's loss, KL divergence and gradients, in float64."""
    leaves = [x.double().requires_grad_() for x in (HIDDEN, WEIGHT, BIAS)]
    logps, entropies = dense(*leaves)
    options = {"loss_type": "dapo", "max_completion_length": 12, **options}
    loss, kl = grpo_loss(options, logps, mask, advantages, entropies=entropies, **inputs)
    return loss.detach(), kl, torch.autograd.grad(loss * factor, leaves)


def assert_close(values, truths, tolerance=1e-5):
    errors = [relative_error(value, expected) for value, expected in zip(values, truths, strict=True)]
    assert max(errors) <= tolerance, errors


# In the order that all of Liger's releases have; `forward` has them all in the newest, older ones the first of them
LIGER_ARGUMENTS = {
    "__init__": (
        "self beta compiled use_ref_model chunk_size epsilon_low epsilon_high loss_type max_completion_length "
        "importance_sampling_level"
    ),
    "forward": (
        "self _input lin_weight selected_token_ids attention_mask advantages bias ref_per_token_logps "
        "old_per_token_logps ref_input ref_weight ref_bias vllm_is_ratio num_items_in_batch"
    ),
}


@pytest.mark.parametrize("method", LIGER_ARGUMENTS)
def test_positional_arguments_mean_the_same_in_every_liger(method):
    fused = inspect.signature(getattr(FusedLinearGRPOLoss, method)).parameters
    positional = [p.name for p in fused.values() if p.kind is not p.KEYWORD_ONLY]
    assert positional == LIGER_ARGUMENTS[method].split()
    installed = inspect.signature(getattr(LigerFusedLinearGRPOLoss, method)).parameters
    shared = min(len(positional), len(installed))
    assert [*installed][:shared] == positional[:shared]
    for name, parameter in installed.items():
        assert fused[name].default == parameter.default
    assert issubclass(FusedLinearGRPOLoss, LigerFusedLinearGRPOLoss)


def test_an_option_whose_place_differs_between_ligers_is_refused_by_place():
    """The tenth is the temperature in Liger 0.6, and one of SAPO in later releases."""
    first = (0.0, False, False, 1, 0.2, 0.2, "dapo", None, "token")
    assert FusedLinearGRPOLoss(*first).importance_sampling_level == "token"
    with pytest.raises(TypeError, match="positional arguments but 11 were given"):
        FusedLinearGRPOLoss(*first, 0.7)


def liger_cases():
    """For every loss type and level, variations of one option at a time: (name, options, inputs)."""
    ratios = {"per-sequence": RATIO[:, 0], "one-column": RATIO[:, :1], "per-token": RATIO}
    reference = {"ref_input": HIDDEN + 0.1, "ref_weight": 0.9 * WEIGHT, "ref_bias": BIAS}
    for loss_type in LOSS_TYPES:
        for level in ("token", "sequence"):
            if level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
                continue
            base = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.0, "use_ref_model": False}
            if loss_type == "cispo":
                base["epsilon_high"] = 1.3
            kl = {**base, "beta": 0.1, "use_ref_model": True}
            name = f"{loss_type}-{level}".replace("_", "-")
            yield f"{name}-on-policy", base, {}
            yield f"{name}-off-policy", base, {"old_per_token_logps": OLD}
            for shape, ratio in ratios.items():
                yield f"{name}-ratio-{shape}", base, {"old_per_token_logps": OLD, "vllm_is_ratio": ratio}
            yield f"{name}-kl", kl, {"ref_per_token_logps": REF, "vllm_is_ratio": RATIO}
            yield f"{name}-kl-off-policy", kl, {"ref_per_token_logps": REF, "old_per_token_logps": OLD}
            yield f"{name}-kl-reference-model", kl, reference
            yield f"{name}-kl-no-reference", {**kl, "use_ref_model": False}, {"old_per_token_logps": OLD}
            corrected = {**kl, "use_bias_correction_kl": True, "delta": 1.5}
            yield f"{name}-kl-corrected", corrected, {"ref_per_token_logps": REF, "old_per_token_logps": OLD}
            if loss_type in ("dapo", "cispo", "vespo"):
                yield f"{name}-num-items", base, {"num_items_in_batch": torch.tensor(77)}


LIGER_CASES = {name: (options, inputs) for name, options, inputs in liger_cases()}
# Liger before 0.8.2 multiplies the KL term by the ratio of each token at sequence level too
TOKEN_RATIO_CORRECTS_KL = "num_items_in_batch" not in inspect.signature(LigerFusedLinearGRPOLoss.forward).parameters
FIRST_OPTION = {"cispo": "sapo_temperature_pos", "sapo": "sapo_temperature_pos", "luspo": "delta", "vespo": "delta"}


def skip_what_the_installed_liger_lacks(options, inputs):
    known = {
        *inspect.signature(LigerFusedLinearGRPOLoss.__init__).parameters,
        *inspect.signature(LigerFusedLinearGRPOLoss.forward).parameters,
    }
    missing = {*options, *inputs, FIRST_OPTION.get(options["loss_type"], "beta")} - known
    if options.get("use_bias_correction_kl") and options["importance_sampling_level"] == "sequence":
        missing |= {"sequence-level bias correction"} if TOKEN_RATIO_CORRECTS_KL else set()
    if missing:
        pytest.skip(f"the installed Liger has no {', '.join(sorted(missing))}")


@pytest.mark.parametrize("name", LIGER_CASES)
def test_loss_metrics_and_gradients_equal_ligers(name):
    options, inputs = LIGER_CASES[name]
    skip_what_the_installed_liger_lacks(options, inputs)
    _, loss, metrics, grads = run(LigerFusedLinearGRPOLoss, options, **inputs)
    loss_fn, fused_loss, fused_metrics, fused_grads = run(FusedLinearGRPOLoss, options, **inputs)
    assert isinstance(fused_metrics, tuple)
    assert_close([fused_loss, *fused_grads], [loss, *grads], 2e-5 if options["loss_type"] == "vespo" else 1e-5)
    for fused, liger in zip(fused_metrics, metrics, strict=True):
        assert fused.item() == pytest.approx(liger.item(), rel=1e-5, abs=1e-7)
    if loss_fn.objective.is_tokenwise("old_per_token_logps" in inputs):
        assert loss_fn.stats.recomputed == 0


BEYOND_LIGER = {
    "off-policy-mask": ({"off_policy_mask_threshold": 0.05}, {"old_per_token_logps": OLD}),
    "off-policy-mask-sampler": (
        {"off_policy_mask_threshold": 0.05, "loss_type": "grpo"},
        {"old_per_token_logps": OLD, "sampling_per_token_logps": CURRENT + 0.2 * randn(B, T, seed=9)},
    ),
    "top-entropy": ({"top_entropy_quantile": 0.4}, {"old_per_token_logps": OLD}),
    "entropy-bonus": ({"entropy_coef": 0.1, "loss_type": "grpo"}, {"old_per_token_logps": OLD}),
    "entropy-bonus-on-policy": ({"entropy_coef": 0.1}, {}),
    **{
        f"kl-{name}": ({"kl_estimator": name, "beta": 0.2}, {"ref_per_token_logps": REF, "old_per_token_logps": OLD})
        for name in KL_ESTIMATORS
    },
    **{
        f"{name.replace('_', '-')}-normalizer": ({"reduction": name, "loss_type": "sapo"}, {"normalizer": 31.0})
        for name in ("token_mean", "sequence_mean", "fixed_length", "sequence_sum")
    },
    "normalizer": ({}, {"normalizer": torch.tensor(31.0)}),
    "token-advantages": ({}, {"advantages": 0.3 + randn(B, T, seed=10), "old_per_token_logps": OLD}),
}


@pytest.mark.parametrize("name", BEYOND_LIGER)
def test_options_that_liger_lacks_equal_the_oracle(name):
    options, inputs = BEYOND_LIGER[name]
    options = {"beta": 0.0, **options}
    loss_fn, loss, metrics, grads = run(FusedLinearGRPOLoss, options, **inputs)
    names = {"old_per_token_logps": "old", "ref_per_token_logps": "ref", "sampling_per_token_logps": "sampling"}
    inputs = {names.get(key, key): value for key, value in inputs.items()}
    expected, kl, truths = truth(options, **inputs)
    assert_close([loss, *grads], [expected, *truths], 3e-6)
    if options["beta"] != 0.0:
        assert metrics[0].item() == pytest.approx(kl, rel=1e-5)
    if loss_fn.objective.is_tokenwise("old" in inputs):
        assert loss_fn.stats.recomputed == 0


@pytest.mark.parametrize("gap", [1e-2, 1e-4])
def test_the_forecast_of_the_kl_term_is_exact_for_a_reference_close_to_the_policy(gap):
    ref = CURRENT + gap * randn(B, T, seed=11)
    loss_fn, *_ = run(FusedLinearGRPOLoss, {"beta": 0.1}, advantages=torch.zeros(B), ref_per_token_logps=ref)
    assert (loss_fn.stats.backward, loss_fn.stats.recomputed) == ("forecast", 0)


def test_masked_tokens_are_not_computed_and_may_hold_any_value():
    ids, poison = IDS.clone(), torch.full((B, T), float("nan"))
    ids[MASK == 0] = -100
    hidden = HIDDEN.masked_fill(MASK[..., None] == 0, float("nan"))
    loss_fn = FusedLinearGRPOLoss(beta=0.1, temperature=TEMPERATURE)
    weight = WEIGHT.clone().requires_grad_()
    inputs = {
        name: torch.where(MASK == 0, poison, value)
        for name, value in (("old_per_token_logps", OLD), ("ref_per_token_logps", REF), ("vllm_is_ratio", RATIO))
    }
    loss, _ = loss_fn(hidden, weight, ids, MASK, ADVANTAGES, BIAS, **inputs)
    (grad,) = torch.autograd.grad(4 * loss, weight)
    clean = {"old_per_token_logps": OLD, "ref_per_token_logps": REF, "vllm_is_ratio": RATIO}
    _, expected, _, grads = run(FusedLinearGRPOLoss, {"beta": 0.1}, **clean)
    assert_close([loss.detach(), grad], [expected, grads[1]], 1e-6)
    assert loss_fn.stats.rows == MASK.sum()


def test_tokens_without_gradient_enter_no_backward_gemm(monkeypatch):
    from trl_fused_grpo.ops import chunked_linear

    row_counts = []
    add = chunked_linear.GradAccumulator.add
    monkeypatch.setattr(
        chunked_linear.GradAccumulator,
        "add",
        lambda self, rows, logits, *rest: (row_counts.append(len(logits)), add(self, rows, logits, *rest)),
    )
    advantages = torch.tensor([1.4, 0.0, 0.0, -0.2])
    run(FusedLinearGRPOLoss, {"beta": 0.0}, advantages=advantages)
    assert sum(row_counts) == MASK[[0, 3]].sum()


@pytest.mark.parametrize("shape", ["per-sequence", "one-column", "per-token"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_each_token_may_have_its_own_temperature(shape, bias):
    temperature = 0.5 + torch.rand(B, T, generator=torch.Generator().manual_seed(12))
    if shape != "per-token":
        temperature = temperature[:, :1]
    leaves = [x.double().requires_grad_() for x in (HIDDEN, WEIGHT, BIAS)][: 3 if bias else 2]
    logits = leaves[0] @ leaves[1].T + (leaves[2] if bias else 0.0)
    log_p = (logits / temperature.unsqueeze(-1)).log_softmax(-1)
    expected, _ = grpo_loss(
        {"loss_type": "dapo"}, log_p.gather(-1, IDS[..., None]).squeeze(-1), MASK, ADVANTAGES, old=OLD
    )
    truths = torch.autograd.grad(4 * expected, leaves)
    temperature = temperature[:, 0] if shape == "per-sequence" else temperature
    inputs = {"old_per_token_logps": OLD, "temperature": temperature}
    loss_fn, loss, _, grads = run(FusedLinearGRPOLoss, {"beta": 0.0}, bias, **inputs)
    assert_close([loss, *grads], [expected.detach(), *truths], 3e-6)
    assert loss_fn.stats.recomputed == 0


def test_a_frozen_head_runs_in_the_frozen_mode():
    loss_fn = FusedLinearGRPOLoss(beta=0.0, temperature=TEMPERATURE, importance_sampling_level="sequence")
    hidden = HIDDEN.clone().requires_grad_()
    loss, _ = loss_fn(hidden, WEIGHT, IDS, MASK, ADVANTAGES, BIAS, old_per_token_logps=OLD)
    (grad,) = torch.autograd.grad(4 * loss, hidden)
    expected, _, truths = truth({"importance_sampling_level": "sequence"}, old=OLD)
    assert_close([loss.detach(), grad], [expected, truths[0]], 2e-6)
    assert (loss_fn.stats.backward, loss_fn.stats.recomputed) == ("frozen", 0)


def test_the_backward_mode_can_be_forced():
    loss_fn, _, _, grads = run(FusedLinearGRPOLoss, {"beta": 0.0, "backward": "recompute", "logits_mib": 0.001})
    _, _, _, expected = run(FusedLinearGRPOLoss, {"beta": 0.0})
    assert loss_fn.stats.backward == "recompute"
    assert_close(grads, expected, 1e-6)
