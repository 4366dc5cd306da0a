"""Cases of what a user does around the trainer: rewards that use it, base classes, own loops, hooks added later."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.harness.case import Customisation, Training
from tests.harness.customisations import around_the_trainer as a
from tests.harness.customisations import callbacks as c
from tests.harness.customisations import methods as m
from tests.harness.customisations import objectives as o
from tests.harness.customisations import rewards as r
from tests.harness.customisations.methods import subclass
from trl_fused_grpo.parity.case import Trainer

from .common import KL, OFF_POLICY, SAMPLED, VLLM
from .common import customised_case as _case


def around() -> list[Training]:
    """All cases of this module."""
    return [*methods_and_backward(), *later_changes(), *rewards_and_reference(), *own_loops(), *own_modules()]


def on_trainer(change: Callable[[Trainer], Any]) -> Customisation:
    return Customisation(change_trainer=change)


def again(change: Callable[[Trainer], Any]) -> Customisation:
    """A training that `change` interrupts, and that is started a second time."""
    return Customisation(change_trainer=change, train=c.train_again)


def trained_by(train: Callable[[Trainer], Any]) -> Customisation:
    return Customisation(train=train)


def two_adapters(change: Callable[[Trainer], Any] | None = None) -> Customisation:
    return Customisation(load_model=r.with_two_adapters, change_trainer=change)


def methods_and_backward() -> list[Training]:
    return [
        _case("reward-asks", "a reward function asks for log-probs, beta", on_trainer(r.reward_asks), KL),
        _case("reward-asks-vllm", "the same, vLLM", on_trainer(r.reward_asks), VLLM, data=SAMPLED),
        _case("behind-compute-loss", "(Fused, Own): Own.compute_loss", a.behind(m.compute_loss_l2)),
        _case("behind-own-loss", "(Fused, Own): Own._compute_loss", a.behind(o.contrastive_loss_first)),
        _case("behind-log-probs", "(Fused, Own): Own's log-prob method", a.behind(m.log_probs_other_ids)),
        _case("loss-context", "compute_loss_context_manager overridden", subclass(a.loss_context)),
        _case("backward-seen", "accelerator.backward = f", on_trainer(a.see_backward)),
        _case("backward-class", "Accelerator.backward = f", a.clipped_backward()),
        _case("step-in-backward", "weights move in the backward", on_trainer(a.step_in_backward)),
        _case("step-in-backward-vllm", "the same, vLLM", on_trainer(a.step_in_backward), VLLM, data=SAMPLED),
        _case("multi-grad-hook", "torch's hook on all gradients at once", on_trainer(a.see_all_gradients)),
        _case("forwarding-callback", "a callback that is no TrainerCallback", on_trainer(a.forwarding_callback)),
        _case("callback-class", "TrainerCallback.on_substep_end = f", on_trainer(a.callback_class)),
    ]


def later_changes() -> list[Training]:
    """A change that comes between two accumulation windows of one generation batch."""
    return [
        _case(
            "later-hooks", "hooks on gradients added between accumulation windows", a.later(a.clip_by_hooks), OFF_POLICY
        ),
        _case("later-callback", "a callback added between accumulation windows", a.later(a.add_clipping), OFF_POLICY),
        _case(
            "later-compute-loss",
            "compute_loss replaced between accumulation windows",
            a.on_instance_later(m.compute_loss_weights),
            OFF_POLICY,
        ),
    ]


def rewards_and_reference() -> list[Training]:
    logged_late = {"logging_steps": 2, "max_steps": 4, **VLLM}
    return [
        _case("reference-hook", "a hook on the reference model", on_trainer(a.scale_reference), KL),
        _case("reward-logs-vllm", "a reward function logs, vLLM", on_trainer(r.reward_logs), logged_late, data=SAMPLED),
        _case("reward-fails-vllm", "one fails, and train() again, vLLM", again(r.reward_fails), VLLM, data=SAMPLED),
        _case("reward-evaluates", "one leaves the model in evaluation", on_trainer(r.reward_evaluates), OFF_POLICY),
        _case("reward-evaluates-kl", "the same, beta", on_trainer(r.reward_evaluates), KL),
        _case(
            "reward-evaluates-mode",
            "the same, a module that differs in training mode",
            replace(a.around_mlp(a.scaled_in_training_mode), change_trainer=r.reward_evaluates),
        ),
        _case(
            "reward-correction",
            "one changes a bound of vLLM's ratios",
            on_trainer(r.reward_changes_correction),
            VLLM,
            data=SAMPLED,
        ),
        _case("reward-adapter", "one leaves an adapter off", two_adapters(r.reward_switches_adapter), OFF_POLICY),
        _case("reference-adapter", "TRL leaves an adapter off, beta", two_adapters(), {**KL, **OFF_POLICY}),
        _case("interrupted-loss", "KeyboardInterrupt before the backward", again(a.interrupted_loss)),
        _case("interrupted-loss-kl", "the same, beta", again(a.interrupted_loss), KL),
        _case("interrupted-loss-vllm", "the same, vLLM", again(a.interrupted_loss), VLLM, data=SAMPLED),
        _case("train-twice-vllm", "train() again with other arguments", trained_by(a.train_twice), VLLM, data=SAMPLED),
    ]


def own_loops() -> list[Training]:
    return [
        _case("own-loop", "compute_loss in the user's loop", trained_by(a.own_loop)),
        _case("own-loop-kl", "the same, beta", trained_by(a.own_loop), KL),
        _case("own-loop-vllm", "the same, vLLM", trained_by(a.own_loop), VLLM, data=SAMPLED),
        _case("own-steps-vllm", "training_step in the user's loop, vLLM", trained_by(a.own_steps), VLLM, data=SAMPLED),
        _case("generation-alone", "what generation returns, beta", trained_by(a.generate_alone), KL),
        _case("generation-alone-vllm", "the same, vLLM", trained_by(a.generate_alone), VLLM, data=SAMPLED),
    ]


def own_modules() -> list[Training]:
    return [
        _case("module-gate", "a module that mixes tokens through a gate of zero", a.around_mlp(a.gate)),
        _case("module-torch", "a layer of torch's that mixes tokens", a.around_mlp(a.torch_encoder)),
        _case(
            "module-vllm",
            "a module that computes something else with gradient",
            a.around_mlp(a.scaled_in_training),
            VLLM,
            data=SAMPLED,
        ),
    ]
