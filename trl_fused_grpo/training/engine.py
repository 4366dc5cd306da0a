"""The scores of a trainer's batches: which layout its model allows, and the call in its wrappers and precision."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.modeling.checkpointing import lean_checkpoints
from trl_fused_grpo.modeling.fused_forward import CuSeqlensIgnoredError, install_fused_forward
from trl_fused_grpo.modeling.layout import LayoutName
from trl_fused_grpo.modeling.layout_choice import Refusal, choose, supports_shared_prefix, traits
from trl_fused_grpo.modeling.output_projection import output_projection, vocab_size_of

from .checks import check_token_ids
from .customised_model import changed_module, own_class, row_reader, zero_weight
from .logps import LogpsArgs, LogpsOptions, LogpsRequest, PerTokenLogps, RowsRefusedError, compute_logps
from .loss_request import padding_counts


logger = logging.get_logger(__name__)

_ROWS_TRIED = 4
_FORCE = 'If it does not, fused_layout="packed" asks for rows without padding all the same.'


class LogpsEngine:
    """
    PerTokenLogps batches as the options of a trainer say.

    Args:
        trainer (`GRPOTrainer`): whose models and options they are.
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer: Any = trainer  # its options depend on the host's version
        self._refusals: WeakKeyDictionary[nn.Module, Refusal] = WeakKeyDictionary()
        self._tried_out: WeakSet[nn.Module] = WeakSet()
        self._modules: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()

    def look_again(self) -> None:
        """Look for the models' modules anew, as at every generation batch: a walk over all takes as long as a layer."""
        self._modules.clear()

    def option(self, name: str, default: Any) -> Any:
        """An option of [`FusedGRPOConfig`], which the arguments need not be."""
        return getattr(self.trainer.args, name, default)

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """A model in no wrapper but PEFT's."""
        # `unwrap_model` looks for DeepSpeed on the disk each time, where it is not installed
        bare = isinstance(model, PreTrainedModel) or model_compat.is_peft_model(model)
        return model if bare else self.trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=True)

    def causal_lm(self, model: nn.Module) -> PreTrainedModel:
        """The causal language model inside its wrappers, looked up at every call: FSDP and PEFT replace it."""
        unwrapped = self.unwrapped(model)
        return model_compat.without_adapter(getattr(unwrapped, "_orig_mod", unwrapped))  # torch.compile

    def shares_prompts(self, model: nn.Module) -> bool:
        """Whether a prompt stands in a packed row once."""
        return self.option("fused_share_prompts", True) and supports_shared_prefix(self.causal_lm(model))

    def layout(self, model: nn.Module, is_multimodal: bool = False, keeps_padding: str | None = None) -> LayoutName:
        """
        The layout of a model's rows: the one asked for, or the first that the model allows.

        Args:
            model (`nn.Module`): the model, in its wrappers or bare.
            is_multimodal (`bool`): whether there are images.
            keeps_padding (`str`, *optional*): a reason to keep TRL's padding unless another layout is asked for.

        Raises:
            `ValueError`: when the one asked for is not allowed, with the reason.
        """
        unwrapped, causal_lm = self.unwrapped(model), self.causal_lm(model)
        policy = self.trainer.model
        if model is self.trainer.ref_model and model is not policy and self.layout(policy, is_multimodal) == "padded":
            return "padded"  # equal weights are to give equal bits
        reason = None if self.is_forced else keeps_padding or self.why_rows_are_seen(model)
        if reason is not None:
            logger.warning_once(f"Rows keep TRL's padding, because {reason}. {_FORCE}")
            return "padded"
        conditions = (is_multimodal, padding_counts(self.trainer), self._refusals.get(causal_lm))
        return choose(self.option("fused_layout", "auto"), unwrapped, causal_lm, *conditions)

    def why_rows_are_seen(self, model: nn.Module) -> str | None:
        """Why the user's own code may see how rows are laid out in a model, or `None`."""
        found = changed_module(self._modules_of(model))
        return f"{found} may depend on where a token stands" if found else None

    def _modules_of(self, model: nn.Module) -> list[nn.Module]:
        unwrapped = self.unwrapped(model)
        if unwrapped not in self._modules:
            self._modules[unwrapped] = list(unwrapped.modules())
        return self._modules[unwrapped]

    def compute(
        self, logps_request: LogpsRequest, call: LogpsArgs, trl_method: Callable, keeps_padding: str | None = None
    ) -> PerTokenLogps:
        """
        Log-probabilities of a batch, and what else the host asks for.

        Args:
            question ([`LogpsRequest`]): which positions of the batch.
            call ([`LogpsArgs`]): the host's call.
            trl_method (`Callable`): the host's own method for it, which knows how images go with rows.
            keeps_padding (`str`, *optional*): see [`layout`].
        """
        unwrapped = self.unwrapped(call.model)
        causal_lm = self.causal_lm(unwrapped)
        install_fused_forward(causal_lm)
        vocab_size = vocab_size_of(output_projection(causal_lm), causal_lm)
        check_token_ids(call.completion_ids, logps_request.mask, vocab_size)

        rows = (call.input_ids, call.attention_mask, call.logits_to_keep, call.multimodal)
        trl_inputs = (lambda: trl_compat.multimodal_model_inputs(trl_method, *rows)) if call.multimodal else None
        with self.trainer.accelerator.autocast(), lean_checkpoints(unwrapped):
            if causal_lm not in self._tried_out:
                self._try_out(call, self._options(call, keeps_padding))
            while True:
                options = self._options(call, keeps_padding)
                if options.layout == "padded":
                    if logps_request.micro_batch is not None:  # that share a forward, but were not to share padding
                        call = replace(call, batch_size=logps_request.micro_batch)
                    return compute_logps(logps_request, options, call, trl_inputs)
                before = _random_states(call.input_ids)
                try:
                    return compute_logps(logps_request, options, call, trl_inputs)
                except (RowsRefusedError, CuSeqlensIgnoredError) as error:
                    self._refuse(causal_lm, options, error)
                _restore_random_states(before, call.input_ids)

    def _try_out(self, call: LogpsArgs, options: LogpsOptions) -> None:
        """
        Compare, once, what a model with code of its own makes of rows without TRL's padding and of rows with it; where
        it differs, rows keep the padding from now on.
        """
        causal_lm = self.causal_lm(call.model)
        if options.layout == "padded" or self.is_forced:
            return
        self._tried_out.add(causal_lm)
        modules = self._modules_of(call.model)
        found = own_class(modules) or row_reader(modules)
        if found is None:
            return
        gate = zero_weight(modules)
        if self._on_any_process(gate is not None):
            error = RowsRefusedError(
                f"a weight of {gate or found} is still zero: what its code makes of rows is not seen"
            )
            self._refuse(causal_lm, options, error)
            return
        before = _random_states(call.input_ids)
        ids, mask = call.input_ids[:_ROWS_TRIED], call.attention_mask[:_ROWS_TRIED]
        few = replace(call, input_ids=ids, attention_mask=mask, compute_entropy=False, compute_aux_loss=False)
        scored = mask[:, -call.logits_to_keep :]
        with torch.no_grad():
            try:
                logps = [
                    compute_logps(LogpsRequest(scored), replace(options, layout=layout), few, None).logps * scored
                    for layout in (options.layout, "padded")
                ]
            except (RowsRefusedError, CuSeqlensIgnoredError):
                return  # what follows refuses it too, and says why
            finally:
                _restore_random_states(before, call.input_ids)
        difference = (logps[0] - logps[1]).abs().max()
        dtype = torch.get_autocast_dtype(ids.device.type) if torch.is_autocast_enabled(ids.device.type) else None
        eps = torch.finfo(dtype or causal_lm.dtype).eps
        if self._on_any_process(not difference <= max(1e-3, 32 * eps)):  # so that all come to the same end
            error = RowsRefusedError(f"{found}, whose code is not known, makes other log-probs of rows without it")
            self._refuse(causal_lm, options, error)

    def _on_any_process(self, condition: bool) -> bool:
        accelerator = self.trainer.accelerator
        return bool(accelerator.gather(torch.tensor([int(condition)], device=accelerator.device)).any())

    def _options(self, call: LogpsArgs, keeps_padding: str | None) -> LogpsOptions:
        causal_lm = self.causal_lm(call.model)
        layout = self.layout(call.model, bool(call.multimodal), keeps_padding)
        needs_last_column = traits(causal_lm).needs_last_column
        if layout == "packed" and needs_last_column and call.compute_aux_loss:
            layout = "padded"  # the auxiliary loss counts every token, also one that stands for the last column
        return LogpsOptions(
            temperature=trl_compat.temperature_of(self.trainer),
            fp32=self.trainer.args.cast_lm_head_to_fp32,
            backward=self.option("fused_backward", "auto"),
            logits_mib=self.option("fused_logits_mib", None),
            layout=layout,
            share_prompts=self.shares_prompts(call.model),
            forced=self.is_forced,
            needs_last_column=needs_last_column,
            runs_sdpa=causal_lm.config._attn_implementation == "sdpa",
        )

    @property
    def is_forced(self) -> bool:
        """Whether a layout was asked for."""
        return self.option("fused_layout", "auto") != "auto"

    def _refuse(self, causal_lm: PreTrainedModel, options: LogpsOptions, error: RuntimeError) -> None:
        """
        Remember that a model does not take a layout, and tell it once. Every process comes to the same end, as nothing
        that is looked at depends on the batch.

        Raises:
            `ValueError`, [`CuSeqlensIgnoredError`]: when that layout was asked for.
        """
        ignores_borders = isinstance(error, CuSeqlensIgnoredError)
        if self.is_forced and ignores_borders:
            raise error
        if self.is_forced:
            raise ValueError(
                f"fused_layout={options.layout!r} does not fit this model: {error}. Use 'auto'."
            ) from error
        layout: LayoutName = "aligned" if ignores_borders else "padded"
        how = "are aligned instead of packed" if ignores_borders else "keep the padding of the host"
        logger.warning(f"Rows {how} from now on, because {error}")
        self._refusals[causal_lm] = Refusal(str(error), layout)


def _random_states(like: Tensor) -> tuple[Tensor, Tensor | None]:
    """States of the random number generators of the CPU and of a tensor's device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(like.device) if like.is_cuda else None


def _restore_random_states(states: tuple[Tensor, Tensor | None], like: Tensor) -> None:
    cpu, device = states
    torch.set_rng_state(cpu)
    if device is not None:
        torch.cuda.set_rng_state(device, like.device)
