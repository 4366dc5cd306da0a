"""Cases of customisation around the trainer, see [`customised_seams`]."""

from . import customised_callbacks as callbacks
from . import customised_methods as methods
from . import customised_objectives as objectives
from . import customised_seams as seams
from .case import Case, Customisation
from .customised import OFF_POLICY, SAMPLED, VLLM
from .customised import case as _case
from .customised_methods import subclass


def around() -> list[Case]:
    m, o, s = methods, objectives, seams
    kl = {"beta": 0.5}
    logged_late = {"logging_steps": 2, "max_steps": 4, **VLLM}

    def again(act):
        return Customisation(of_trainer=act, train=callbacks.train_again)

    def on_trainer(act):
        return Customisation(of_trainer=act)

    def trained_by(train):
        return Customisation(train=train)

    return [
        _case("reward-asks", "a reward function asks for log-probs, beta", on_trainer(s.reward_asks), kl),
        _case("reward-asks-vllm", "the same, vLLM", on_trainer(s.reward_asks), VLLM, data=SAMPLED),
        _case("behind-compute-loss", "(Fused, Own): Own.compute_loss", s.behind(m.compute_loss_l2)),
        _case("behind-own-loss", "(Fused, Own): Own._compute_loss", s.behind(o.contrastive_loss_first)),
        _case("behind-log-probs", "(Fused, Own): Own's log-prob method", s.behind(m.log_probs_other_ids)),
        _case("loss-context", "compute_loss_context_manager overridden", subclass(s.loss_context)),
        _case("backward-seen", "accelerator.backward = f", on_trainer(s.see_backward)),
        _case("backward-class", "Accelerator.backward = f", s.clipped_backward()),
        _case("step-in-backward", "weights move in the backward", on_trainer(s.step_in_backward)),
        _case("step-in-backward-vllm", "the same, vLLM", on_trainer(s.step_in_backward), VLLM, data=SAMPLED),
        _case("multi-grad-hook", "torch's hook on all gradients at once", on_trainer(s.see_all_gradients)),
        _case("forwarding-callback", "a callback that is no TrainerCallback", on_trainer(s.forwarding_callback)),
        _case("callback-class", "TrainerCallback.on_substep_end = f", on_trainer(s.callback_class)),
        _case("later-hooks", "hooks on gradients between windows", s.later(s.clip_by_hooks), OFF_POLICY),
        _case("later-callback", "a callback added between windows", s.later(s.add_clipping), OFF_POLICY),
        _case(
            "later-compute-loss",
            "compute_loss replaced between windows",
            s.on_instance_later(m.compute_loss_weights),
            OFF_POLICY,
        ),
        _case("reference-hook", "a hook on the reference model", on_trainer(s.scale_reference), kl),
        _case("reward-logs-vllm", "a reward function logs, vLLM", on_trainer(s.reward_logs), logged_late, data=SAMPLED),
        _case("reward-fails-vllm", "one fails, and train() again, vLLM", again(s.reward_fails), VLLM, data=SAMPLED),
        _case("interrupted-loss", "KeyboardInterrupt before the backward", again(s.interrupted_loss)),
        _case("interrupted-loss-kl", "the same, beta", again(s.interrupted_loss), kl),
        _case("interrupted-loss-vllm", "the same, vLLM", again(s.interrupted_loss), VLLM, data=SAMPLED),
        _case("train-twice-vllm", "train() again with other arguments", trained_by(s.train_twice), VLLM, data=SAMPLED),
        _case("own-loop", "compute_loss in a loop of one's own", trained_by(s.own_loop)),
        _case("own-loop-kl", "the same, beta", trained_by(s.own_loop), kl),
        _case("own-loop-vllm", "the same, vLLM", trained_by(s.own_loop), VLLM, data=SAMPLED),
        _case("own-steps-vllm", "training_step so, vLLM", trained_by(s.own_steps), VLLM, data=SAMPLED),
        _case("generation-alone", "what generation gives, beta", trained_by(s.generate_alone), kl),
        _case("generation-alone-vllm", "the same, vLLM", trained_by(s.generate_alone), VLLM, data=SAMPLED),
        _case("module-gate", "a module that mixes tokens through a closed gate", s.around_mlp(s.gate)),
        _case("module-torch", "a layer of torch's that mixes tokens", s.around_mlp(s.torchs_encoder)),
        _case(
            "module-vllm",
            "a module that differs with gradient",
            s.around_mlp(s.scaled_in_training),
            VLLM,
            data=SAMPLED,
        ),
    ]
