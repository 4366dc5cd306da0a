"""Cases of `fuse`: RLOO, TRL's experimental trainers, where the installed TRL has them, and classes of users."""

from dataclasses import replace

from tests.harness.case import Training
from tests.harness.customisations import fused_classes as f
from tests.harness.customisations import methods as m
from tests.harness.customisations import objectives as o
from tests.harness.customisations.callbacks import at, set_iterations

from .common import KL, OFF_POLICY, SAMPLED, VLLM
from .common import customised_case as _case


def of_trl() -> list[Training]:
    gmpo = f.experimental("gmpo", "GMPOTrainer", "GMPOConfig")
    gspo = f.experimental("gspo_token.grpo_trainer", "GRPOTrainer")
    levels = {"importance_sampling_level": "sequence_token"}
    minillm = f.experimental("minillm", "MiniLLMTrainer", "MiniLLMConfig", f.with_teacher)
    filtered = f.experimental("gfpo", "GFPOTrainer", "GFPOConfig", f.with_filter)
    replay = f.experimental("grpo_with_replay_buffer", "GRPOWithReplayBufferTrainer", "GRPOWithReplayBufferConfig")
    dppo = f.experimental("dppo", "DPPOTrainer", "DPPOConfig")
    return [
        _case("fuse-gmpo", "fuse(GMPOTrainer)", gmpo),
        _case("fuse-gmpo-off-policy", "the same with old log-probs", gmpo, OFF_POLICY),
        _case("fuse-gmpo-kl", "the same with a reference", gmpo, {**KL, **OFF_POLICY}),
        _case("fuse-gmpo-vllm", "the same with vLLM ratios, which GMPO leaves out", gmpo, VLLM, data=SAMPLED),
        _case("gmpo-in-bases", "class Mine(FusedGRPOTrainer, GMPOTrainer)", f.gmpo_in_bases(), OFF_POLICY),
        _case("fuse-gspo-token", "fuse of GSPO-token's trainer", gspo, levels),
        _case("fuse-gspo-token-off-policy", "the same with old log-probs", gspo, {**levels, **OFF_POLICY}),
        _case("fuse-minillm", "fuse(MiniLLMTrainer)", minillm),
        _case("fuse-gfpo", "fuse(GFPOTrainer)", filtered, {"num_remains_in_group": 2}),
        _case("fuse-replay-buffer", "fuse(GRPOWithReplayBufferTrainer)", replay, OFF_POLICY),
        _case("fuse-dppo", "fuse(DPPOTrainer)", dppo, data=SAMPLED),
    ]


def of_rloo() -> list[Training]:
    plain = f.rloo()
    merged, free = f.merging(plain), replace(plain, forwards="grad-only")
    # At a high temperature the update is far from the rounding of the ratio, which is that of a sum over a sequence
    warm = {"temperature": 3.0, "learning_rate": 1.0}
    off_policy = {**warm, **OFF_POLICY}
    slow = {**off_policy, "learning_rate": 0.3}
    rewards = {"normalize_advantages": True, "reward_clip_range": (0.3, 1.2)}
    zero_grad = {"fused_skip_zero_grad_sequences": True}
    later = replace(plain, change_trainer=at("on_step_end", set_iterations).change_trainer)
    lora = {**warm, **KL, "learning_rate": 0.5}
    return [
        _case("rloo", "RLOOTrainer, on-policy without a KL penalty", free, warm),
        _case("rloo-off-policy", "the same with two iterations", merged, {**warm, "num_iterations": 2}),
        _case("rloo-iterations", "a callback sets num_iterations", later, warm),
        _case("rloo-options", "the same with other advantages", merged, {**off_policy, **rewards}),
        _case("rloo-kl", "the same with a KL penalty in the reward", merged, {**off_policy, **KL}),
        _case("rloo-kl-lora", "the same with LoRA", merged, lora, adapter="attention"),
        _case("rloo-zero-grad", "zero-grad sequences left out", plain, slow, fused=zero_grad),
    ]


def of_users() -> list[Training]:
    every = f.own(f.every_method)
    return [
        _case("fuse-every-method", "fuse of a class that overrides every method", every),
        _case("fuse-every-method-vllm", "the same with vLLM ratios", every, VLLM, data=SAMPLED),
        _case("fuse-every-method-kl", "the same with a reference", every, {**KL, **OFF_POLICY}),
        _case("fuse-mixin-behind", "fuse of a class with a mixin behind TRL's", f.own(f.mixin_behind)),
        _case("fuse-two-levels", "fuse of a class over a class with a mixin", f.own(f.two_levels)),
        _case("fuse-subclass-hook", "fuse of a class whose subclasses are changed", f.own(f.subclass_hook)),
        _case("fuse-dense-log-probs", "fuse of a class with log-probs of its own", f.own(f.dense_log_probs)),
        _case("fuse-own-batches", "fuse of a class with micro-batches of its own", f.own(f.own_batches), OFF_POLICY),
        _case("fuse-own-loop", "fuse of a class whose train clips after each micro-batch", f.own(f.own_loop)),
        _case("fuse-options", "fuse of a class that computes its options", f.own(f.computed_temperature), OFF_POLICY),
        _case("fuse-by-name-compute-loss", "compute_loss calls TRL's by name", f.by_name(m.compute_loss_l2)),
        _case("fuse-by-name-training-step", "training_step calls TRL's by name", f.by_name(m.training_step_clips)),
        _case("fuse-by-name-log-probs", "the log-prob method calls TRL's by name", f.by_name(m.log_probs_scaled)),
        _case("fuse-by-name-loss", "_compute_loss calls TRL's by name", f.by_name(o.loss_twice)),
        _case(
            "fuse-by-name-generation",
            "generation calls TRL's by name, vLLM",
            f.by_name(o.generation_read),
            VLLM,
            data=SAMPLED,
        ),
        _case("fuse-by-name-inputs", "_prepare_inputs calls TRL's by name", f.by_name(o.inputs_weighted), OFF_POLICY),
        _case("fuse-own-loss", "fuse of a class with a loss of its own", f.fused(f.subclass(o.own_loss_entropy))),
    ]
