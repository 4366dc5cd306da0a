"""Cases of customisation: what people do with a trainer, in whole runs of `trainer.train()`."""

from typing import Any

from . import customised_callbacks as callbacks
from . import customised_methods as methods
from . import customised_objectives as objectives
from .case import Case, Customisation
from .cases_customised_model import adapters, hooks, models
from .cases_customised_seams import around
from .customised import OFF_POLICY, PLAIN, SAMPLED, VLLM
from .customised import case as _case
from .customised_methods import on_host, on_instance, subclass


def controls() -> list[Case]:
    """Nothing is customised: forwards must be merged here, or the other cases prove nothing."""
    merged, once = Customisation(forwards="merged"), Customisation(forwards="once")
    return [
        _case("control", "nothing customised: micro-batches share forwards", merged),
        _case("control-even", "the same, sequences of like lengths", Customisation(), data=PLAIN),
        _case("control-vllm", "vLLM ratios, no pass for old log-probs", once, VLLM, data=SAMPLED),
        _case("control-sequence-mask", "vLLM as it comes: sequence_mask", once, data=SAMPLED),
        _case("control-off-policy", "two windows of one generation batch", merged, OFF_POLICY),
        _case("control-num-iterations", "num_iterations 2", merged, {"num_iterations": 2, "max_steps": 4}),
        _case(
            "control-vllm-num-iterations",
            "vLLM ratios, num_iterations 2",
            Customisation(),
            {"num_iterations": 2, "max_steps": 4, **VLLM},
            data=SAMPLED,
        ),
    ]


def losses() -> list[Case]:
    m = methods
    return [
        _case("compute-loss-l2", "compute_loss plus an L2 term", subclass(m.compute_loss_l2)),
        _case("compute-loss-l2-vllm", "the same with vLLM ratios", subclass(m.compute_loss_l2), VLLM, data=SAMPLED),
        _case("compute-loss-sft", "compute_loss plus a forward of its own", subclass(m.compute_loss_sft)),
        _case("compute-loss-scaled", "compute_loss times a factor of the call", subclass(m.compute_loss_scaled)),
        _case("compute-loss-call-number", "a term that grows with each call", subclass(m.compute_loss_call_number)),
        _case("compute-loss-epsilon", "epsilon set in each call", subclass(m.compute_loss_epsilon), OFF_POLICY),
        _case("compute-loss-weights", "weights changed in each call", subclass(m.compute_loss_weights)),
        _case("compute-loss-advantages", "advantages changed in each call", subclass(m.compute_loss_advantages)),
        _case("compute-loss-seen", "each micro-batch's loss written down", subclass(m.compute_loss_seen)),
        _case("training-step", "a training_step with its own backward", subclass(m.training_step)),
        _case("training-step-gradients", "training_step reads gradients", subclass(m.training_step_gradients)),
        _case("training-step-clips", "training_step clips after each backward", subclass(m.training_step_clips)),
        _case("training-step-weights", "training_step changes weights", subclass(m.training_step_weights)),
        _case("log-probs-other-ids", "log-prob method scores other ids", subclass(m.log_probs_other_ids)),
        _case(
            "log-probs-other-ids-vllm", "the same with vLLM ratios", subclass(m.log_probs_other_ids), VLLM, data=SAMPLED
        ),
        _case("log-probs-second-call", "log-prob method scores other ids as well", subclass(m.log_probs_second_call)),
        _case("log-probs-temperature", "log-prob method sets a temperature", subclass(m.log_probs_temperature)),
        _case("log-probs-scaled", "log-prob method changes its result", subclass(m.log_probs_scaled), OFF_POLICY),
    ]


def own_objectives() -> list[Case]:
    o = objectives
    quantile = {"top_entropy_quantile": 0.5}
    return [
        _case("own-loss", "a _compute_loss of one's own", subclass(o.own_loss)),
        _case("own-loss-entropy", "one with an entropy term", subclass(o.own_loss_entropy)),
        _case("contrastive-loss", "one that scores other completions too", subclass(o.contrastive_loss)),
        _case("contrastive-loss-first", "other completions before TRL's loss", subclass(o.contrastive_loss_first)),
        _case(
            "contrastive-loss-host",
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
        _case("inputs-trimmed", "_prepare_inputs cuts padding in place", subclass(o.inputs_trimmed)),
        _case("inputs-epsilon", "_prepare_inputs sets epsilon", subclass(o.inputs_epsilon), OFF_POLICY),
        _case("inputs-weighted", "_prepare_inputs weighs advantages", subclass(o.inputs_weighted)),
    ]


def patches() -> list[Case]:
    m, o = methods, objectives
    changed = [
        ("compute-loss", "compute_loss", m.compute_loss_l2),
        ("own-loss", "_compute_loss", o.own_loss_entropy),
        ("contrastive-loss", "_compute_loss", o.contrastive_loss_first),
        ("training-step", "training_step", m.training_step_clips),
        ("log-probs", "_get_per_token_logps_and_entropies", m.log_probs_other_ids),
    ]
    cases = []
    for name, method, make in changed:
        cases += [
            _case(f"host-{name}", f"GRPOTrainer.{method} = f before construction", on_host(make)),
            _case(f"host-{name}-late", f"GRPOTrainer.{method} = f after construction", on_host(make, late=True)),
            _case(f"instance-{name}", f"trainer.{method} = a bound method", on_instance(make, "method")),
        ]
    return [
        *cases,
        _case("instance-own-loss-lambda", "trainer._compute_loss = a lambda", on_instance(o.own_loss, "lambda")),
        _case("instance-own-loss-partial", "trainer._compute_loss = a partial", on_instance(o.own_loss, "partial")),
        _case(
            "instance-own-loss-vllm",
            "trainer._compute_loss replaced, vLLM",
            on_instance(o.loss_plus, "method"),
            VLLM,
            data=SAMPLED,
        ),
        _case("instance-inputs", "trainer._prepare_inputs = a bound method", on_instance(o.inputs_weighted, "method")),
        _case(
            "instance-generation-vllm",
            "trainer._generate_and_score_completions replaced, vLLM",
            on_instance(o.generation_read, "method"),
            VLLM,
            data=SAMPLED,
        ),
    ]


def generations() -> list[Case]:
    o = objectives
    kinds = [
        ("replayed", "half of the completions from a replay buffer", o.generation_replayed),
        ("read", "old log-probs read", o.generation_read),
        ("holes", "holes in completion_mask", o.generation_holes),
        ("prompt-hole", "a prompt's last token masked", o.generation_prompt_hole),
        ("advantages", "advantages replaced", o.generation_advantages),
    ]
    cases = []
    for name, covers, make in kinds:
        cases += [
            _case(f"generation-{name}", f"{covers}", subclass(make)),
            _case(f"generation-{name}-vllm", f"{covers}, vLLM", subclass(make), VLLM, data=SAMPLED),
        ]
    return cases


def windows() -> list[Case]:
    c = callbacks
    kl = {"beta": 0.5, "optim": "adamw_torch", "learning_rate": 0.001}
    vllm: dict[str, Any] = {"config": VLLM, "data": SAMPLED}
    return [
        _case(
            "substep-gradients", "a callback reads gradients within a window", c.at("on_substep_end", c.see_gradients)
        ),
        _case("substep-clips", "a callback clips gradients within a window", c.at("on_substep_end", c.clip_gradients)),
        _case("substep-weights", "a callback changes weights within a window", c.at("on_substep_end", c.scale_weights)),
        _case("substep-weights-vllm", "the same, vLLM", c.at("on_substep_end", c.scale_weights), **vllm),
        _case(
            "substep-epsilon",
            "a callback sets epsilon within a window",
            c.at("on_substep_end", c.set_epsilon),
            OFF_POLICY,
        ),
        _case("step-epsilon", "the same between windows", c.at("on_step_begin", c.set_epsilon), OFF_POLICY),
        _case("step-temperature", "a callback sets the temperature", c.at("on_step_begin", c.set_temperature)),
        _case("step-freezes", "a callback freezes a layer", c.at("on_step_begin", c.freeze)),
        _case(
            "step-gradients", "a callback reads the window's gradients", c.at("on_pre_optimizer_step", c.see_gradients)
        ),
        _case("epoch-stop", "an epoch stopped within a window", c.at("on_substep_end", c.stop_epoch)),
        _case("epoch-stop-vllm", "the same, vLLM", c.at("on_substep_end", c.stop_epoch), **vllm),
        _case("training-stop", "training stopped within a window", c.at("on_substep_end", c.stop_training)),
        _case(
            "interrupted",
            "KeyboardInterrupt within a window, and train() again",
            c.at("on_substep_end", c.interrupt, c.train_again),
        ),
        _case("interrupted-vllm", "the same, vLLM", c.at("on_substep_end", c.interrupt, c.train_again), **vllm),
        _case("evaluation-within", "an evaluation within a window", c.at("on_substep_end", c.evaluate)),
        _case("evaluation-within-vllm", "the same, vLLM", c.at("on_substep_end", c.evaluate), **vllm),
        _case(
            "misaligned",
            "generation batches of three micro-batches, windows of two",
            Customisation(),
            {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 6},
        ),
        _case(
            "misaligned-vllm",
            "the same, vLLM",
            Customisation(),
            {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 6, **VLLM},
            data=SAMPLED,
        ),
        _case("nan-micro-batch", "one loss is NaN", c.nan_advantage()),
        _case(
            "nan-micro-batch-unfiltered", "the same, NaN logged", c.nan_advantage(), {"logging_nan_inf_filter": False}
        ),
        _case("own-shuffle", "TRL's shuffle of a generation batch replaced", c.own_shuffle()),
        _case("kl-without-advantages", "beta, all advantages zero: stock moves nothing", c.equal_rewards(), kl),
        _case("kl-without-advantages-lora", "the same with LoRA", c.equal_rewards(), kl, adapter="attention"),
        _case("kl", "beta with a reference model, over several steps", Customisation(), {"beta": 0.5}),
        _case(
            "kl-synced",
            "the reference model follows",
            Customisation(),
            {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1},
        ),
    ]


CUSTOMISED_CASES: tuple[Case, ...] = (
    *controls(),
    *losses(),
    *own_objectives(),
    *patches(),
    *generations(),
    *windows(),
    *hooks(),
    *models(),
    *adapters(),
    *around(),
)
