"""Cases of methods of the trainer that a user replaces: in a subclass, on TRL's class, or on the instance."""

from tests.harness.case import Customisation, Training
from tests.harness.customisations import methods as m
from tests.harness.customisations import objectives as o
from tests.harness.customisations.methods import on_instance, on_trl, subclass

from .common import OFF_POLICY, PLAIN, SAMPLED, VLLM
from .common import customised_case as _case


def controls() -> list[Training]:
    """Nothing is customised. Micro-batches must share forwards here, or the other cases prove nothing."""
    merged, grad_only = Customisation(forwards="merged"), Customisation(forwards="grad-only")
    return [
        _case("control", "nothing customised: micro-batches share forwards", merged),
        _case("control-even", "the same, sequences of like lengths", Customisation(), data=PLAIN),
        _case("control-vllm", "vLLM ratios, no forward for old log-probs", grad_only, VLLM, data=SAMPLED),
        _case("control-sequence-mask", "vLLM's default: sequence_mask", grad_only, data=SAMPLED),
        _case("control-off-policy", "two accumulation windows of one generation batch", merged, OFF_POLICY),
        _case("control-num-iterations", "num_iterations 2", merged, {"num_iterations": 2, "max_steps": 4}),
        _case(
            "control-vllm-num-iterations",
            "vLLM ratios, num_iterations 2",
            Customisation(),
            {"num_iterations": 2, "max_steps": 4, **VLLM},
            data=SAMPLED,
        ),
    ]


def overridden_methods() -> list[Training]:
    return [
        _case("compute-loss-l2", "compute_loss plus an L2 term", subclass(m.compute_loss_l2)),
        _case("compute-loss-l2-vllm", "the same with vLLM ratios", subclass(m.compute_loss_l2), VLLM, data=SAMPLED),
        _case("compute-loss-sft", "compute_loss plus a forward of its own", subclass(m.compute_loss_sft)),
        _case("compute-loss-scaled", "compute_loss times a factor of the call", subclass(m.compute_loss_scaled)),
        _case("compute-loss-call-number", "a term that grows from call to call", subclass(m.compute_loss_call_number)),
        _case("compute-loss-epsilon", "epsilon set in each call", subclass(m.compute_loss_epsilon), OFF_POLICY),
        _case("compute-loss-weights", "weights changed in each call", subclass(m.compute_loss_weights)),
        _case("compute-loss-advantages", "advantages changed in each call", subclass(m.compute_loss_advantages)),
        _case("compute-loss-seen", "each micro-batch's loss recorded", subclass(m.compute_loss_seen)),
        _case("training-step", "a training_step with its own backward", subclass(m.training_step)),
        _case("training-step-gradients", "training_step reads gradients", subclass(m.training_step_gradients)),
        _case("training-step-clips", "training_step clips after each backward", subclass(m.training_step_clips)),
        _case("training-step-weights", "training_step changes weights", subclass(m.training_step_weights)),
        _case("log-probs-other-ids", "log-prob method gets other ids", subclass(m.log_probs_other_ids)),
        _case(
            "log-probs-other-ids-vllm", "the same with vLLM ratios", subclass(m.log_probs_other_ids), VLLM, data=SAMPLED
        ),
        _case(
            "log-probs-second-call", "log-prob method called for other ids as well", subclass(m.log_probs_second_call)
        ),
        _case("log-probs-temperature", "log-prob method sets a temperature", subclass(m.log_probs_temperature)),
        _case("log-probs-scaled", "log-prob method changes its result", subclass(m.log_probs_scaled), OFF_POLICY),
    ]


def patches() -> list[Training]:
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
            _case(f"trl-{name}", f"GRPOTrainer.{method} = f before construction", on_trl(make)),
            _case(f"trl-{name}-late", f"GRPOTrainer.{method} = f after construction", on_trl(make, late=True)),
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
