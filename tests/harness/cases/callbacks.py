"""Cases of callbacks and of trainings that stop, evaluate or generate within an accumulation window."""

from typing import Any

from tests.harness.case import Customisation, Training
from tests.harness.customisations import callbacks as c

from .common import KL, OFF_POLICY, SAMPLED, VLLM
from .common import customised_case as _case


_VLLM: dict[str, Any] = {"config": VLLM, "data": SAMPLED}


def callbacks() -> list[Training]:
    """A callback reads or changes something within an accumulation window, or between two."""
    return [
        _case(
            "substep-gradients",
            "a callback reads gradients within an accumulation window",
            c.at("on_substep_end", c.see_gradients),
        ),
        _case(
            "substep-clips",
            "a callback clips gradients within an accumulation window",
            c.at("on_substep_end", c.clip_gradients),
        ),
        _case(
            "substep-weights",
            "a callback changes weights within an accumulation window",
            c.at("on_substep_end", c.scale_weights),
        ),
        _case("substep-weights-vllm", "the same, vLLM", c.at("on_substep_end", c.scale_weights), **_VLLM),
        _case(
            "substep-epsilon",
            "a callback sets epsilon within an accumulation window",
            c.at("on_substep_end", c.set_epsilon),
            OFF_POLICY,
        ),
        _case(
            "step-epsilon", "the same between accumulation windows", c.at("on_step_begin", c.set_epsilon), OFF_POLICY
        ),
        _case(
            "step-iterations", "a callback sets num_iterations, vLLM", c.at("on_step_end", c.set_iterations), **_VLLM
        ),
        _case("step-temperature", "a callback sets the temperature", c.at("on_step_begin", c.set_temperature)),
        _case("step-freezes", "a callback freezes a layer", c.at("on_step_begin", c.freeze)),
        _case(
            "step-gradients",
            "a callback reads the gradients before the optimizer step",
            c.at("on_pre_optimizer_step", c.see_gradients),
        ),
    ]


def interruptions() -> list[Training]:
    """An accumulation window is not finished, or an evaluation runs within it."""
    return [
        _case("epoch-stop", "an epoch stopped within an accumulation window", c.at("on_substep_end", c.stop_epoch)),
        _case("epoch-stop-vllm", "the same, vLLM", c.at("on_substep_end", c.stop_epoch), **_VLLM),
        _case(
            "training-stop", "training stopped within an accumulation window", c.at("on_substep_end", c.stop_training)
        ),
        _case(
            "interrupted",
            "KeyboardInterrupt within an accumulation window, and train() again",
            c.at("on_substep_end", c.interrupt, c.train_again),
        ),
        _case("interrupted-vllm", "the same, vLLM", c.at("on_substep_end", c.interrupt, c.train_again), **_VLLM),
        _case(
            "out-of-memory-once",
            "memory runs out once, auto_find_batch_size",
            Customisation(change_trainer=c.out_of_memory_once),
            {"num_iterations": 5, "max_steps": 2, "learning_rate": 0.2},
        ),
        _case("evaluation-within", "an evaluation within an accumulation window", c.at("on_substep_end", c.evaluate)),
        _case("evaluation-within-vllm", "the same, vLLM", c.at("on_substep_end", c.evaluate), **_VLLM),
    ]


def generation_batches() -> list[Training]:
    """Generation batches that end within an accumulation window, or hold something unusual."""
    misaligned = {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 6}
    return [
        _case(
            "misaligned",
            "generation batches of three micro-batches, accumulation windows of two",
            Customisation(),
            misaligned,
        ),
        _case(
            "misaligned-vllm",
            "the same, vLLM",
            Customisation(),
            {**misaligned, **VLLM},
            data=SAMPLED,
        ),
        _case("nan-micro-batch", "one loss is NaN", c.nan_advantage()),
        _case(
            "nan-micro-batch-unfiltered", "the same, NaN logged", c.nan_advantage(), {"logging_nan_inf_filter": False}
        ),
        _case("own-shuffle", "TRL's shuffle of a generation batch replaced", c.own_shuffle()),
    ]


def reference_models() -> list[Training]:
    adam = {**KL, "optim": "adamw_torch", "learning_rate": 0.001}
    return [
        _case("kl-without-advantages", "beta, all advantages zero: stock moves nothing", c.equal_rewards(), adam),
        _case("kl-without-advantages-lora", "the same with LoRA", c.equal_rewards(), adam, adapter="attention"),
        _case("kl", "beta with a reference model, over several steps", Customisation(), KL),
        _case(
            "kl-synced",
            "the reference model follows",
            Customisation(),
            {**KL, "sync_ref_model": True, "ref_model_sync_steps": 1},
        ),
    ]
