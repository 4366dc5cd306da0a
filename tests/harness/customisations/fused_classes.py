"""Subclasses of TRL's trainer that [`fuse`] makes fused ones of: TRL's experimental trainers, and users' own."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM

from tests.harness.case import Customisation
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.trainers import CONFIGS, TRAINERS
from trl_fused_grpo.parity.case import SkippedError

from .methods import Method, squares, subclass


def experimental(module: str, trainer: str, config: str | None = None, make: Any = None) -> Customisation:
    """A trainer of `trl.experimental`, by its module, its name and that of its arguments; `make` subclasses it."""

    def load(name: str) -> Any:
        try:
            return getattr(import_module(f"trl.experimental.{module}"), name)
        except ImportError as missing:
            raise SkippedError(f"this TRL has no trl.experimental.{module}") from missing

    return Customisation(
        make_class=lambda _: load(trainer) if make is None else make(load(trainer)),
        load_config=None if config is None else lambda: load(config),
        uses_fuse=True,
    )


def rloo() -> Customisation:
    """TRL's `RLOOTrainer`, itself no `GRPOTrainer`."""
    stock, config = TRAINERS[1], CONFIGS[1]
    return Customisation(make_class=lambda _: stock, load_config=lambda: config, uses_fuse=True)


def fused(custom: Customisation) -> Customisation:
    """The class is made for stock, and `fuse` makes the fused one of it."""
    return replace(custom, uses_fuse=True)


def own(make: Callable[[Any], type]) -> Customisation:
    """A user's class: `make` gets TRL's."""
    return Customisation(make_class=make, uses_fuse=True)


def with_teacher(base: Any) -> type:
    class Distilled(base):
        def __init__(self, model, **kwargs):
            teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            with torch.no_grad():
                for parameter in teacher.parameters():
                    parameter.mul_(1.05)
            super().__init__(model, teacher, **kwargs)

    return Distilled


def with_filter(base: Any) -> type:
    def shortest(group_completions, group_rewards, **kwargs):
        return [[-reward for reward in rewards] for rewards in group_rewards]

    class Filtered(base):
        def __init__(self, **kwargs):
            super().__init__(group_filter_func=shortest, **kwargs)

        def _generate(self, prompts):
            output = super()._generate(prompts)
            # The GFPO of TRL before 1.0 unpacks fewer values than TRL's `_generate` returns
            return (*output[:2], *output[-3:]) if Version("1.0.0") > trl_compat.TRL else output

    return Filtered


def sampled(base: Any) -> type:
    """Its rollouts carry the sampler's log-probs also where it does not run vLLM."""

    class Sampled(base):
        pass

    return Sampled


def every_method(base: Any) -> type:
    """Overrides everything on the way of a micro-batch, and an argument of its own in the constructor."""

    class Own(base):
        def __init__(self, *args, weight=0.5, **kwargs):
            super().__init__(*args, **kwargs)
            self.weight, self.calls = weight, 0

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.seen.append(float(loss))
            return loss

        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) + 0.003 * squares(self)

        def _compute_loss(self, model, inputs):
            self.calls += 1
            inputs = {**inputs, "advantages": inputs["advantages"] * (1 + self.weight * (self.calls % 2))}
            return super()._compute_loss(model, inputs)

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return logps * 0.9, *others

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return {**output, "advantages": output["advantages"] * 1.5}

    return Own


def mixin_behind(base: Any) -> type:
    """A mixin of the `Trainer`'s whose `training_step` TRL's calls with `super()`."""
    trainer = next(cls for cls in base.__mro__ if cls.__module__ == "transformers.trainer")

    class Doubling(trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            return loss

    return type("Own", (base, Doubling), {"__module__": __name__})


def two_levels(base: Any) -> type:
    """A class over a class, with a mixin in front that changes the arguments of a `super()` call."""

    class Mixin:
        def compute_loss(self, model, inputs, **kwargs):
            mask = inputs["completion_mask"].clone()
            mask[:, 5:] = 0
            inputs = {**inputs, "completion_mask": mask}
            return super().compute_loss(model, inputs, **kwargs)  # ty: ignore[missing-attribute]

    class First(base):
        def _compute_loss(self, model, inputs):
            return 1.5 * super()._compute_loss(model, inputs)

    class Second(Mixin, First):
        pass

    return Second


def subclass_hook(base: Any) -> type:
    """`__init_subclass__` doubles the loss of each subclass once."""

    class Base(base):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            own_loss = cls._compute_loss
            cls._compute_loss = lambda self, *args: 2 * own_loss(self, *args)

    class Own(Base):
        pass

    return Own


def dense_log_probs(base: Any) -> type:
    """A log-prob method of its own, which calls no other."""

    class Own(base):
        def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
            log_p = logits.log_softmax(-1)
            logps = log_p.gather(-1, input_ids[:, -logits_to_keep:].unsqueeze(-1)).squeeze(-1)
            return trl_compat.logps_result(logps, -(log_p.exp() * log_p).sum(-1).detach(), None)

    return Own


def own_batches(base: Any) -> type:
    """`_prepare_inputs` without TRL's, with micro-batches of its own."""

    class Own(base):
        def _prepare_inputs(self, generation_batch):
            if not hasattr(self, "waiting") or not self.waiting:
                batch = self._generate_and_score_completions(generation_batch)
                count = self.args.steps_per_generation
                rows = len(batch["completion_ids"]) // count
                self.waiting = [
                    {
                        name: value[i * rows : (i + 1) * rows] if torch.is_tensor(value) and value.dim() else value
                        for name, value in batch.items()
                    }
                    for i in range(count)
                ]
            return self.waiting.pop(0)

    return Own


def by_name(make: Callable[[Any], dict[str, Method]]) -> Customisation:
    """Methods that call those of TRL's class by its name."""
    return fused(subclass(make))


def merging(custom: Customisation) -> Customisation:
    """Its objective is known: micro-batches must share forwards."""
    return replace(custom, forwards="merged")


def gmpo_in_bases() -> Customisation:
    """`class Mine(FusedGRPOTrainer, GMPOTrainer)`: GMPO's loss stands between the fused trainer and TRL's."""
    load = experimental("gmpo", "GMPOTrainer", "GMPOConfig")

    def make_class(cls: type) -> type:
        assert load.make_class is not None
        trainer = load.make_class(cls)
        return trainer if cls in trainer.__mro__ else type("Mine", (cls, trainer), {"__module__": __name__})

    return replace(load, make_class=make_class, uses_fuse=False)


def own_loop(base: Any) -> type:
    """`train` is a loop of its own, which clips gradients after each micro-batch."""

    class Own(base):
        def train(self):
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
            self.model.train()
            batches = iter(self.get_train_dataloader())
            for step in range(2):  # as many as an epoch has
                for number in range(self.args.gradient_accumulation_steps):
                    is_last = number == self.args.gradient_accumulation_steps - 1
                    self.accelerator.gradient_state._set_sync_gradients(is_last)
                    self.seen.append(float(self.training_step(self.model, next(batches), None)))
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
                self.state.global_step = step + 1

    return Own


def computed_temperature(base: Any) -> type:
    """A temperature that follows the micro-batch, and a loss coefficient that does."""

    class Own(base):
        @property
        def temperature(self):
            return (0.7, 1.0, 1.3)[getattr(self, "_step", 0) % 3]

        @temperature.setter
        def temperature(self, value):
            pass

        @property
        def epsilon_high(self):
            return (0.01, 0.2, 0.5)[getattr(self, "_step", 0) % 3]

        @epsilon_high.setter
        def epsilon_high(self, value):
            pass

    return Own
