"""Oracle of the GRPO objectives: papers' formulas, token by token, in float64. Imports nothing from the package."""

import math

import torch


def _ratio(options, sequence, t):
    """Importance ratio of token `t`, of the token or its sequence."""
    logps, old = sequence["logps"], sequence["old"]
    if options.get("importance_sampling_level", "token") == "token":
        return (logps[t] - old[t]).exp()
    kept = [s for s in range(len(logps)) if sequence["mask"][s]]
    return (sum(logps[s] - old[s] for s in kept) / max(len(kept), 1)).exp()


def _kl(options, logp, ref, ratio):
    r = (ref - logp).exp()
    name = options.get("kl_estimator", "k3")
    kl = {"k1": -r.log(), "k2": r.log() ** 2 / 2, "k3": r - 1 - r.log(), "k4": -ratio * r.log()}[name]
    return kl * ratio if options.get("use_bias_correction_kl") else kl


def _gamma_weight(options, sequence, advantage):
    sign = "pos" if advantage >= 0 else "neg"
    k = options.get(f"vespo_k_{sign}", 2.0 if sign == "pos" else 3.0)
    lam = options.get(f"vespo_lambda_{sign}", 3.0 if sign == "pos" else 2.0)
    log_w = sum(
        min(max(float((new - old).detach()), -20.0), 20.0)
        for new, old, m in zip(sequence["logps"], sequence["old"], sequence["mask"], strict=True)
        if m
    )
    log_w = log_w + sum(math.log(float(x)) for x in sequence["is_ratio"])
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    return math.exp(lam + k * log_w - lam * math.exp(log_w))


def _policy(options, sequence, t, advantage):
    loss_type = options["loss_type"]
    ratio, logp = _ratio(options, sequence, t), sequence["logps"][t]
    if loss_type == "cispo":
        return -min(float(ratio.detach()), options.get("epsilon_high", 0.2)) * advantage * logp
    if loss_type == "vespo":
        return -_gamma_weight(options, sequence, advantage) * advantage * logp
    if loss_type == "sapo":
        tau = options.get("sapo_temperature_pos", 1.0) if advantage > 0 else options.get("sapo_temperature_neg", 1.05)
        return -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
    clipped = ratio.clamp(1 - options.get("epsilon_low", 0.2), 1 + options.get("epsilon_high", 0.2))
    if options.get("delta") is not None:
        ratio = ratio.clamp(max=options["delta"])
    return -torch.minimum(ratio * advantage, clipped * advantage)


def _off_policy_mask(options, sequence, advantage):
    threshold = options.get("off_policy_mask_threshold")
    if threshold is None or advantage >= 0:
        return 1.0
    gaps = [
        float((s - new).detach())
        for s, new, m in zip(sequence["sampling"], sequence["logps"], sequence["mask"], strict=True)
        if m and not math.isnan(float(s))
    ]
    return float(sum(gaps) / max(int(sum(sequence["mask"])), 1) <= threshold)


def _weight(options, mask, row, normalizer):
    """Weight of a token of `row` in the loss."""
    own = {
        **dict.fromkeys(("grpo", "sapo"), "sequence_mean"),
        "dr_grpo": "fixed_length",
        "luspo": "sequence_sum",
    }
    name = options.get("reduction") or own.get(options["loss_type"], "token_mean")
    if name == "token_mean":
        return 1 / (max(float(mask.sum()), 1.0) if normalizer is None else normalizer)
    sequences = len(mask) if normalizer is None else normalizer
    length = {"sequence_mean": max(float(mask[row].sum()), 1.0), "fixed_length": options.get("max_completion_length")}
    return 1 / (sequences * length.get(name, 1.0))


def grpo_loss(options, logps, mask, advantages, old=None, ref=None, is_ratio=None, **more):
    """
    Loss and mean KL divergence, scalars.

    Args:
        options: the objective's options under TRL's names.
        logps: `[B, T]`, float64, differentiable.
        mask: `[B, T]`.
        advantages: `[B]` or `[B, T]`.
        old, ref, is_ratio: `[B, T]` or None.
        more: `entropies` and `sampling` `[B, T]`, `normalizer`.
    """
    advantages = advantages.double().reshape(len(mask), -1).expand(mask.shape)
    old = logps.detach() if old is None else old.double()
    sampling = old if more.get("sampling") is None else more["sampling"].double()
    is_ratio = torch.ones_like(logps) if is_ratio is None else is_ratio.double().reshape(len(mask), -1)
    entropies = more.get("entropies")
    kept = mask.bool()
    high_entropy = kept
    if options.get("top_entropy_quantile", 1.0) < 1.0:
        high_entropy = kept & (entropies >= torch.quantile(entropies[kept], 1 - options["top_entropy_quantile"]))

    loss, kl_sum = logps.sum() * 0, 0.0
    for row, t in kept.nonzero().tolist():
        sequence = {"logps": logps[row], "old": old[row], "mask": mask[row], "sampling": sampling[row]}
        sequence["is_ratio"] = is_ratio[row]
        advantage = float(advantages[row, t])
        term = (
            _policy(options, sequence, t, advantage)
            * _off_policy_mask(options, sequence, advantage)
            * high_entropy[row, t]
        )
        if options["loss_type"] != "vespo":
            term = term * is_ratio.expand(mask.shape)[row, t]
        if options.get("beta", 0.0) != 0.0 and ref is not None:
            kl = _kl(options, logps[row, t], ref[row, t].double(), _ratio(options, sequence, t))
            term, kl_sum = term + options["beta"] * kl, kl_sum + float(kl.detach())
        loss = loss + term * _weight(options, mask, row, more.get("normalizer"))
    tokens = max(float(mask.sum()), 1.0)
    if options.get("entropy_coef", 0.0) != 0.0:
        loss = loss - options["entropy_coef"] * entropies[kept].sum() / tokens
    return loss, kl_sum / tokens
