"""Cases of losses, masks and inputs that a user computes, in methods of a subclass."""

from tests.harness.case import Training
from tests.harness.customisations import objectives as o
from tests.harness.customisations.methods import subclass

from .common import OFF_POLICY, SAMPLED, VLLM
from .common import customised_case as _case


def objectives() -> list[Training]:
    quantile = {"top_entropy_quantile": 0.5}
    return [
        _case("own-loss", "the user's _compute_loss", subclass(o.own_loss)),
        _case("own-loss-entropy", "one with an entropy term", subclass(o.own_loss_entropy)),
        _case("contrastive-loss", "one with log-probs of other completions too", subclass(o.contrastive_loss)),
        _case("contrastive-loss-first", "other completions before TRL's loss", subclass(o.contrastive_loss_first)),
        _case(
            "contrastive-loss-padded",
            "other completions, TRL's padding",
            subclass(o.contrastive_loss_first),
            fused={"fused_layout": "padded"},
        ),
        _case("loss-twice", "TRL's loss of two versions of a micro-batch", subclass(o.loss_twice)),
        _case("loss-plus", "TRL's loss of other advantages, doubled", subclass(o.loss_plus)),
        _case("entropy-mask", "get_high_entropy_mask overridden", subclass(o.entropy_mask), quantile),
        _case(
            "own-off-policy-mask",
            "get_off_policy_mask overridden",
            subclass(o.off_policy_mask),
            {"off_policy_mask_threshold": 0.1},
        ),
        _case("inputs-trimmed", "_prepare_inputs trims padding in place", subclass(o.inputs_trimmed)),
        _case("inputs-epsilon", "_prepare_inputs sets epsilon", subclass(o.inputs_epsilon), OFF_POLICY),
        _case("inputs-weighted", "_prepare_inputs weighs advantages", subclass(o.inputs_weighted)),
    ]


def generations() -> list[Training]:
    kinds = [
        ("replayed", "half of the completions from a replay buffer", o.generation_replayed),
        ("read", "old log-probs read", o.generation_read),
        ("holes", "holes in completion_mask", o.generation_holes),
        ("prompt-hole", "a prompt's last token masked", o.generation_prompt_hole),
        ("advantages", "advantages replaced", o.generation_advantages),
    ]
    cases = []
    for name, description, make in kinds:
        cases += [
            _case(f"generation-{name}", description, subclass(make)),
            _case(f"generation-{name}-vllm", f"{description}, vLLM", subclass(make), VLLM, data=SAMPLED),
        ]
    return cases
