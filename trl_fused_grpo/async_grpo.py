"""`FusedAsyncGRPOTrainer`: TRL's experimental `AsyncGRPOTrainer` on the rows, layers and head of the fused trainers."""

import inspect
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.utils import logging
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from ._compat import models as model_compat
from ._compat import trainers
from ._utils import on_any_process, shown_as, temporary_attr
from .loss.batch import put_at
from .loss.forecast import SharedRowForecast, grad_rows_first
from .loss.objective import GRPOObjective
from .modeling.attention.packed import uninstall_attention, watched_call
from .modeling.attention.watch import WatchedCall, carry_arguments
from .modeling.head.fused_forward import FusedRequest, as_complex
from .modeling.head.output_projection import logit_scaling, output_projection
from .modeling.layers.compiled import layers_to_compile, why_not_compiled
from .modeling.layers.forward_override import override_forward, restore_forward
from .modeling.layers.unpacked import install_unpacking, uninstall_unpacking
from .modeling.rows.layout import of_trie
from .modeling.rows.layout_choice import traits, why_not_packed, why_prompts_are_not_shared
from .ops.linear_logps import FusedStats
from .options import FusedOptions, fused_loss_of
from .training.checks import check_aux_loss
from .training.findings import log_no_effect, reasons_of_model


logger = logging.get_logger(__name__)
trainers.check_async(AsyncGRPOTrainer)

# The options that it heeds. The others are about what TRL's asynchronous trainer does otherwise, or not at all
OPTIONS = ("fused_compile", "fused_backward", "fused_logits_mib")
_RESULTS = ("log_probs", "entropy", "aux_loss")


class _FusedCall:
    """How a trainer's model answers TRL's call for the log-probs of a prefix trie."""

    def __init__(self, trainer: "FusedAsyncGRPOTrainer", defaults: FusedOptions):
        self.trainer, self.options, self._defaults = trainer, defaults, defaults
        self.is_on = self.is_new = False  # whether this package answers, and a training has begun
        self.batch: dict[str, Tensor] | None = None  # whose loss TRL's own code computes
        self.stats = FusedStats()
        self.refused: list[str] = []  # layers that TRL's own attention does not serve

    def read_options(self, args: Any) -> None:
        """Read the options from a trainer's arguments, and refuse those that it does not heed."""
        self.options = options = FusedOptions.from_args(args, self._defaults)
        for name, default in vars(FusedOptions()).items():
            if name not in OPTIONS and getattr(options, name) != default:
                raise ValueError(
                    f"{name}={getattr(options, name)!r} does not apply to AsyncGRPOTrainer: leave it out. The options "
                    f"that do are {', '.join(OPTIONS)}."
                )

    @property
    def causal_lm(self) -> Any:
        """The causal language model inside its wrappers."""
        return model_compat.causal_lm_of(self.trainer.model)

    def attach(self) -> None:
        """Let the model answer. TRL reads scale and temperature when a trainer is made."""
        causal_lm = self.causal_lm
        output_projection(causal_lm)  # refuses
        check_aux_loss(self.trainer, causal_lm)
        self._scaling, self._temperature = logit_scaling(causal_lm), self.trainer.temperature
        override_forward(causal_lm, self.answer)
        install_unpacking(causal_lm)
        self.look()

    def look(self) -> None:
        """Decide who answers, TRL or this package."""
        causal_lm, trainer, self.is_new = self.causal_lm, self.trainer, False
        model = trainer.accelerator.unwrap_model(trainer.model)
        found = reasons_of_model(model, causal_lm, forces_rows=False)
        reason = found[0].text if found else self._choose_attention(model, causal_lm)
        if on_any_process(trainer.accelerator, "model", reason is not None):
            self.leave(reason or "another process has unknown code")
            return
        self.is_on = True
        reason = why_not_compiled(self.options.fused_compile, trainer.accelerator.device)
        log_no_effect("fused_compile=True" if self.options.fused_compile else None, reason)

    def _choose_attention(self, model: Any, causal_lm: Any) -> str | None:
        """Have a model's layers ask for an attention whose rows may be packed; else why there is none."""
        config, reasons = causal_lm.config.get_text_config(), list[str | None]()
        is_plain = not traits(causal_lm).has_sinks and getattr(config, "attn_logit_softcapping", None) is None
        for name in ("sdpa", "eager") if is_plain else ("eager",):
            try:
                causal_lm.set_attn_implementation(name)
                reasons.append(why_not_packed(model, causal_lm))
            except ValueError as error:  # the model does not have it
                reasons.append(str(error))
            if reasons[-1] is None:
                return None
        return reasons[0]

    def leave(self, reason: str) -> None:
        """Let TRL's own head and attention answer from now on."""
        self.is_on = False
        if self.refused:
            raise ValueError(
                f"AsyncGRPOTrainer cannot train {', '.join(self.refused)} of {type(self.causal_lm).__name__}, and its "
                f"rows cannot be packed otherwise, because {reason}."
            )
        self.causal_lm.set_attn_implementation(trainers.async_module().TREE_ATTENTION)
        logger.warning_once(f"{type(self.trainer).__name__} runs TRL's own model call, because {reason}.")

    def detach(self) -> None:
        """Undo what was done to the model and to transformers' attention. Idempotent."""
        causal_lm, self.is_on = self.causal_lm, False
        causal_lm.set_attn_implementation(trainers.async_module().TREE_ATTENTION)
        restore_forward(causal_lm)
        uninstall_unpacking(causal_lm)
        uninstall_attention()

    def ask(self, model: Any, **model_inputs: Any) -> Any:
        """Call a model as TRL's loss does. What comes out of its wrappers is complex, see [`as_complex`]."""
        outputs = model(**model_inputs)
        for name in _RESULTS:
            value = getattr(outputs, name)
            if value is not None and value.is_complex():
                setattr(outputs, name, value.real)
        return outputs

    def answer(self, causal_lm: Any, original: Any, *args: Any, fused_lm_head: bool = False, **given: Any) -> Any:
        """The forward of a causal language model: with `fused_lm_head=True` and a trie, its log-probs `[1, S]`."""
        if not (self.is_on and fused_lm_head and "tree_kv_index" in given):
            return original(*args, fused_lm_head=fused_lm_head, **given)
        names = ("input_ids", "position_ids", "tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
        row = of_trie(*(given[name] for name in names), why_prompts_are_not_shared(causal_lm) is None)
        labels = given["shift_labels"]  # [1, S]
        request = self._request(labels, row.places, bool(given.get("output_router_logits")))
        others = {name: given[name] for name in given if not name.startswith(("tree_", "shift_labels"))}
        is_compiled = why_not_compiled(self.options.fused_compile, labels.device) is None
        request.compiled = layers_to_compile(causal_lm)[0] if is_compiled else ()
        with watched_call(WatchedCall(row.lengths), causal_lm) as call:
            model_inputs = {**others, **row.model_inputs, "watched": call}
            carry_arguments(model_inputs)
            results = request(causal_lm, **model_inputs)
        if call.reason is not None:
            self.leave(call.reason)
            return original(*args, fused_lm_head=fused_lm_head, **given)
        self.stats, request.stats.layout = request.stats, "packed"
        logps, entropies, *aux_loss = (result.real for result in results)
        values = [put_at(request.positions, each, labels.shape) for each in (logps, entropies)] + aux_loss
        if self.batch is not None:
            values = [as_complex(value) for value in values]
        return trainers.fused_output(**dict(zip(_RESULTS, values, strict=False)))

    def _request(self, labels: Tensor, places: Tensor | None, aux_loss: bool) -> FusedRequest:
        """What the model should return: log-probs of the labels that count, with a forecast of TRL's own loss."""
        batch, needs_grad, terms = self.batch, None, None
        if batch is not None:
            counts = batch["token_index"] >= 0
            terms = batch["token_index"][counts], batch["advantages"][counts], batch["old_log_probs"][counts]
            needs_grad = torch.zeros_like(labels, dtype=torch.bool)
            needs_grad[0, terms[0][terms[1] != 0]] = True
        positions, grad_rows = grad_rows_first(labels != -100, needs_grad)
        forecast = None
        if terms is not None:
            low, high = self.trainer.epsilon_low, self.trainer.epsilon_high
            objective = GRPOObjective(epsilon_low=low, epsilon_high=high)
            forecast = SharedRowForecast.of(objective, positions, grad_rows, terms)
        return FusedRequest(
            positions,
            labels,
            self._temperature,
            self._scaling,
            forecast,
            logit_positions=positions if places is None else places[positions],
            aux_loss=aux_loss,
            logits_mib=self.options.fused_logits_mib,
            backward=self.options.fused_backward or "auto",
        )


class FusedAsyncGRPOTrainer(AsyncGRPOTrainer):
    """
    Drop-in for TRL's experimental `AsyncGRPOTrainer` (TRL 1.16): the same constructor, objective and metrics.
    [`fuse`] gives it for TRL's class.

    ```python
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl_fused_grpo import fuse, fuse_config

    args = fuse_config(AsyncGRPOConfig)(output_dir="out", fused_compile=False)  # or TRL's AsyncGRPOConfig
    trainer = fuse(AsyncGRPOTrainer)(model_name, reward_funcs=reward, args=args, train_dataset=dataset)
    trainer.train()
    ```

    - TRL's own `compute_loss` makes the loss. Its model call is answered by the fused head, whose gradient is forecast.
    - Attention is that of the other fused trainers: no FlashAttention 3 is needed, and a CPU will do. Sinks and layers
      that carry a state are served too. The latter get each sample with its own prefix: more tokens than
      `token_budget` counts.
    - Options are `use_liger_loss`, `fused_compile`, `fused_backward` and `fused_logits_mib`.
    - Unknown model code keeps TRL's model call, which is logged once.

    Beside TRL's metrics it logs `fused/rows_recomputed`, the fraction of rows whose gradient was not as forecast.

    Raises:
        `ValueError`: in the constructor, when the model cannot be fused, or for another `fused_*` option.
    """

    args: AsyncGRPOConfig
    _tag_names: ClassVar[list[str]] = [*AsyncGRPOTrainer._tag_names, "fused-async-grpo"]  # ty: ignore[incompatible-attribute-override]

    @shown_as(AsyncGRPOTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any):
        names = [*inspect.signature(AsyncGRPOTrainer.__init__).parameters][1:]
        config = {**dict(zip(names, args, strict=False)), **kwargs}.get("args")
        self.use_liger_loss, defaults = fused_loss_of(config)
        self._fused = _FusedCall(self, defaults)
        if not self.use_liger_loss:
            super().__init__(*args, **kwargs)
            logger.warning_once(f"{type(self).__name__} trains with TRL's own loss, because use_liger_loss=False.")
            return
        self._fused.read_options(config)
        with trainers.all_layers_allowed() as self._fused.refused:
            super().__init__(*args, **kwargs)
        self._fused.attach()

    def detach(self) -> None:
        """
        Undo what this trainer did to its model, which asks for TRL's attention again, and to transformers' tables.
        Idempotent; a training does it again.
        """
        self._fused.detach()

    @property
    def fused_stats(self) -> FusedStats:
        """Counts of the last forward; its backward fills in `recomputed`."""
        return self._fused.stats

    def train(self, *args, **kwargs):
        if self.use_liger_loss:
            self._fused.read_options(self.args)
            self._fused.attach()
            self._fused.is_new = True
        return super().train(*args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self._fused.is_new:
            self._fused.look()  # again, for by now the model is in its wrappers
        if not self._fused.is_on:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with temporary_attr(self._fused, "batch", inputs):
            return super().compute_loss(partial(self._fused.ask, model), inputs, *args, **kwargs)

    def _log_step_metrics(self):
        with trainers.unknown_flops_allowed() if self.use_liger_loss else nullcontext():
            super()._log_step_metrics()

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self._fused.is_on:
            stats = self._fused.stats
            self._metrics["train"]["fused/rows_recomputed"].append((float(stats.recomputed), float(stats.rows)))
        return loss
