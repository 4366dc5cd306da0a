"""`FusedGRPOTrainer`: TRL's `GRPOTrainer` with its log-probabilities taken from the fused linear function."""

import inspect
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from trl_fused_grpo.modeling.head.output_projection import output_projection
from trl_fused_grpo.ops.linear_logps import FusedStats
from trl_fused_grpo.training.findings import replaced_behind, replaced_method
from trl_fused_grpo.training.requests import LogpsArgs
from trl_fused_grpo.training.state import FusedState
from trl_fused_grpo.training.summary import Summary, summary_of

from ._compat import trl as trl_compat
from ._compat.trainers import trl_class
from ._utils import shown_as
from .options import fused_loss_of


# The overrides stand in front of a trainer of TRL, whose methods their `super()` finds
_Trainer: Any = object


class FusedTrainerMixin(_Trainer):
    """The overrides that every fused trainer has. See [`FusedGRPOTrainer`]."""

    model: nn.Module

    def __init__(self, *args: Any, **kwargs: Any):
        # A class of the user's between this one and TRL's may take further arguments
        names = [*inspect.signature(trl_class(type(self)).__init__).parameters][1:]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        config, model = arguments.get("args"), arguments.get("model")
        layer_kernels = getattr(config, "use_liger_kernel", False)
        self.use_liger_loss, defaults = fused_loss_of(config)
        self._fused = FusedState(self, defaults)
        if not self.use_liger_loss:
            super().__init__(*args, **kwargs)
            self._fused.attach_nothing()
            return
        if isinstance(model, PreTrainedModel):
            output_projection(model)  # refuses with more to say than TRL's constructor
        with trl_compat.without_liger_flag(config), trl_compat.adapter_on_head_allowed():
            super().__init__(*args, **kwargs)
        self._fused.attach(layer_kernels)

    def detach(self) -> None:
        """
        Undo what this trainer did to objects that outlive it. Idempotent; training, or any other call for log-probs,
        does it again.

        - Models that log-probs were asked of have a `forward` that takes the keyword `fused`, and layers with a state
          or an attention of their own one that unpacks rows. For other calls both do what they did. Undone here, but
          where Accelerate's mixed precision has wrapped it a `forward` stays, and runs the original.
        - While packed rows run, or a graph of them lives, transformers' attention and mask functions are replaced by
          functions that do the same for all other calls. Here garbage is collected, so that no graph is left.
        - Undone after each call: mask functions of padded rows on CUDA, with cuDNN's attention off; forwards of
          compiled layers, which do not checkpoint meanwhile; the accelerator's `backward`; the model's `train`;
          with another `kl_estimator` than TRL's the trainer's `beta`; with `fused_keep_base_weights` PEFT's merging.
        - What stays: of the hooks that transformers adds to the input embeddings at each generation the last one. With
          `use_liger_kernel=True` Liger's layers on a GPU, with `args.liger_kernel_config` changed; on the CPU
          `args.use_liger_loss` is set in its place.
        """
        self._fused.detach()

    @property
    def fused_stats(self) -> FusedStats:
        """Counts of the last forward with gradients; its backward fills in `recomputed`."""
        stats = self._fused.window.stats
        return stats[-1] if stats else FusedStats()

    def fused_layout(self) -> str:
        """The layout that the policy's rows get: `"packed"` or `"padded"`."""
        return "packed" if self._fused.engine.packs(self.model, self._fused.ladder.findings) else "padded"

    def fused_summary(self) -> Summary:
        """The parts of this training, and why none is faster: lines of [`SummaryLine`], and as a string a table."""
        return summary_of(self._fused.engine)

    def train(self, *args, **kwargs):
        with self._fused.training():
            return super().train(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator, *args, **kwargs):
        self._fused.begin_accumulation(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not self.use_liger_loss:
            return super().training_step(model, inputs, num_items_in_batch)
        with self._fused.training_step(model):
            return super().training_step(model, inputs, num_items_in_batch)

    def _prepare_inputs(self, generation_batch):
        # A reward function may leave the model in evaluation
        before, is_training = self._buffered_inputs, self.model.training
        inputs = super()._prepare_inputs(generation_batch)
        if self.use_liger_loss and is_training and self._buffered_inputs is not before:
            self._fused.plan(self._buffered_inputs)
        return inputs

    def _generate_and_score_completions(self, inputs):
        generation = partial(super()._generate_and_score_completions, inputs)
        return self._fused.generate(generation) if self.use_liger_loss else generation()

    @trl_compat.profiling_decorator
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self.use_liger_loss or return_outputs or replaced_behind(self, "compute_loss"):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return self.compute_liger_loss(model, inputs)

    def compute_liger_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """
        Loss of one micro-batch, a scalar: TRL's `_compute_loss` on fused log-probabilities.

        The log-probabilities come with the gradient that each token is expected to receive, forecast from importance
        ratios, tool mask, normalizer and the options of the loss.
        """
        if not self.use_liger_loss:  # TRL < 1.15 has one of its own, for `use_liger_kernel=True`
            return super().compute_liger_loss(model, inputs)
        return self._compute_loss(model, inputs)

    def _compute_loss(self, model, inputs):
        trl_loss = partial(super()._compute_loss, model)
        if not self.use_liger_loss:
            return trl_loss(inputs)
        if replaced_behind(self, "_compute_loss") or replaced_method(self, trl_compat.OBJECTIVE_METHODS):
            return trl_loss(inputs)
        return self._fused.compute_loss(inputs, trl_loss)

    @trl_compat.profiling_decorator
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        trl_method = super()._get_per_token_logps_and_entropies
        call = LogpsArgs.of(args, kwargs)
        if not self.use_liger_loss:
            return trl_compat.logps_result(*trl_compat.call_trl_logps(trl_method, **vars(call)))
        return self._fused.per_token_logps(call, trl_method)


class FusedGRPOTrainer(FusedTrainerMixin, GRPOTrainer):  # ty: ignore[lost-keyword-for-regular-parameter] - TRL's name
    """
    Drop-in for [`~trl.GRPOTrainer`]: the same constructor, objective and metrics, without `[batch, length, vocab]`
    logits.

    Every log-probability (policy, old policy, reference) comes from the fused linear function; TRL's own
    `_compute_loss` turns them into the loss. With `use_liger_loss=False` in its arguments it is the stock trainer.
    `use_liger_kernel=True` means Liger's layer kernels as well.

    ```python
    from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer

    args = FusedGRPOConfig(output_dir="out")  # or TRL's GRPOConfig
    trainer = FusedGRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=dataset)
    trainer.train()
    ```

    Micro-batches of an accumulation window may share a forward of the model (`fused_max_tokens_per_forward`). Each has
    its loss in its own training step. The gradients of all come with the last of them.

    Methods that you override, hooks and replaced forwards work as in stock: what is not a library's own code lowers the
    level of the whole training, and the reason is logged once (`docs/faster-paths.md`).

    Beside TRL's metrics it logs `fused/rows_recomputed`, the fraction of rows whose gradient was not as forecast.

    Raises:
        `ValueError`: in the constructor, when model or options cannot be fused; the message says what to change.
    """

    args: GRPOConfig
    _tag_names: ClassVar[list[str]] = [*getattr(GRPOTrainer, "_tag_names", []), "fused-grpo"]  # ty: ignore[incompatible-attribute-override]

    @shown_as(GRPOTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
