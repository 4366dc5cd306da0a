"""Log-probabilities of a trainer's batches: the layout that its model allows, in its wrappers and its precision."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_fused_grpo._compat import models as model_compat
from trl_fused_grpo._compat import torch as torch_compat
from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.modeling.adapters import fused_adapters, uninstall_adapters
from trl_fused_grpo.modeling.checkpointing import lean_checkpoints
from trl_fused_grpo.modeling.compiled_modules import compiling
from trl_fused_grpo.modeling.fused_forward import CuSeqlensIgnoredError, install_fused_forward, uninstall_fused_forward
from trl_fused_grpo.modeling.layer_memo import LayerMemo, layers_as_they_are
from trl_fused_grpo.modeling.layout import LayoutName
from trl_fused_grpo.modeling.layout_choice import Refusal, choose, layout_of_width, traits, why_prompts_are_not_shared
from trl_fused_grpo.modeling.multimodal import MultimodalInputs
from trl_fused_grpo.modeling.output_projection import output_projection, vocab_size_of
from trl_fused_grpo.modeling.unpacked_layers import install_unpacking, uninstall_unpacking
from trl_fused_grpo.ops.kernels import why_not_triton

from .agreement import elsewhere, on_any_process, widest_batch, with_images_anywhere
from .checks import check_token_ids
from .customised_model import changed_module, unknown_code
from .eligibility import forget_modules
from .logps import PromptsNotSharedError, RowsRefusedError, compute_logps, multimodal_inputs
from .logps_request import LogpsArgs, LogpsOptions, LogpsRequest, PerTokenLogps
from .loss_request import padding_counts
from .memory import MemoryBudget, kept_in_forward, memory_budget
from .random_states import RandomStates
from .trial import Tried, try_layout, try_rows


logger = logging.get_logger(__name__)

_HOW_TO_FORCE = 'If it does not, fused_layout="packed" asks for rows without padding all the same.'


class LogpsEngine:
    """
    Computes log-probabilities as the options of a trainer say.

    Args:
        trainer (`GRPOTrainer`): whose models and options they are.
        defaults ([`FusedOptions`]): the options that its arguments do not have.
    """

    def __init__(self, trainer: GRPOTrainer, defaults: FusedOptions):
        self.trainer: Any = trainer  # its attributes depend on the version of TRL
        self.options = self._defaults = defaults
        self._refusals: WeakKeyDictionary[nn.Module, dict[bool, Refusal]] = WeakKeyDictionary()
        self._tried: LayerMemo[Tried] = LayerMemo(lambda _: Tried())
        self._modules: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()
        self._unshared_with_images: WeakSet[nn.Module] = WeakSet()
        self._installed: WeakSet[PreTrainedModel] = WeakSet()
        self.memory: MemoryBudget | None = None
        self.temperature_when_made = 1.0

    def options_asked_for(self) -> FusedOptions:
        """The options that the trainer's arguments have now."""
        return FusedOptions.from_args(self.trainer.args, self._defaults)

    def read_options(self) -> None:
        """Read the options from the trainer's arguments."""
        self.options = self.options_asked_for()
        self.memory = memory_budget(self.trainer, self.options.fused_memory)

    def install(self, model: nn.Module) -> None:
        """Let a model's forward take the keyword `fused`. Idempotent."""
        causal_lm = self.causal_lm(model)
        install_fused_forward(causal_lm)
        self._installed.add(causal_lm)

    def uninstall(self) -> None:
        """Undo every [`install`]. Idempotent."""
        for causal_lm in list(self._installed):
            uninstall_fused_forward(causal_lm)
            uninstall_unpacking(causal_lm)
            uninstall_adapters(causal_lm.modules())
        self._installed.clear()

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """A model in no wrapper but PEFT's."""
        # Where DeepSpeed is not installed, `unwrap_model` looks for it on the disk at every call
        bare = isinstance(model, PreTrainedModel) or model_compat.is_peft_model(model)
        return model if bare else self.trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=True)

    def causal_lm(self, model: nn.Module) -> PreTrainedModel:
        """The causal language model inside its wrappers, looked up at every call: FSDP and PEFT replace it."""
        return model_compat.without_adapter(torch_compat.without_compiler(self.unwrapped(model)))

    def list_modules_anew(self) -> None:
        """Forget which modules the models have, as at each generation batch: to list them takes as long as a layer."""
        self._modules.clear()
        forget_modules()

    def _modules_of(self, model: nn.Module) -> list[nn.Module]:
        unwrapped = self.unwrapped(model)
        if unwrapped not in self._modules:
            self._modules[unwrapped] = torch_compat.modules_of(unwrapped)
        return self._modules[unwrapped]

    def layout(
        self,
        model: nn.Module,
        is_multimodal: bool = False,
        keeps_padding: str | None = None,
        reads_padding: bool | None = None,
    ) -> LayoutName:
        """
        The layout of a model's rows: the one asked for, or the first that the model allows.

        Args:
            model (`nn.Module`): the model, in its wrappers or bare.
            is_multimodal (`bool`): whether there are images.
            keeps_padding (`str`, *optional*): a reason to keep TRL's padding unless another layout is asked for.
            reads_padding (`bool`, *optional*):
                Whether TRL's objective reads padding. By default the trainer's objective is asked.

        Raises:
            `ValueError`: when the one asked for is not allowed, with the reason.
        """
        if reads_padding is None:
            reads_padding = padding_counts(self.trainer)
        unwrapped, causal_lm = self.unwrapped(model), self.causal_lm(model)
        policy = self.trainer.model
        is_reference = model is self.trainer.ref_model and model is not policy
        if is_reference and self.layout(policy, is_multimodal, reads_padding=reads_padding) == "padded":
            return "padded"  # equal weights are to give equal bits
        reason = None if self.options.forces_layout else keeps_padding or self.why_rows_are_seen(model)
        if reason is not None:
            logger.warning_once(f"Rows keep TRL's padding, because {reason}. {_HOW_TO_FORCE}")
            return "padded"
        conditions = (is_multimodal, reads_padding, self.refusal(causal_lm, is_multimodal))
        with layers_as_they_are():
            return choose(self.options.fused_layout, unwrapped, causal_lm, *conditions)

    def refusal(self, causal_lm: PreTrainedModel, is_multimodal: bool) -> Refusal | None:
        """What the first forwards of a model showed of its layouts, or `None`."""
        refusals = self._refusals.get(causal_lm, {})
        return refusals.get(is_multimodal) or refusals.get(False)

    def shares_prompts(self, model: nn.Module) -> bool:
        """Whether a prompt stands in a packed row once."""
        return self.options.fused_share_prompts and why_prompts_are_not_shared(self.causal_lm(model)) is None

    def why_rows_are_seen(self, model: nn.Module) -> str | None:
        """Why the user's own code may see how rows are laid out in a model, or `None`."""
        reader = changed_module(self._modules_of(model)) or elsewhere(self.trainer, "rows", model)
        return f"{reader} may depend on where a token stands" if reader else None

    def unknown_code(self, model: nn.Module) -> str | None:
        """What of a model's code is not known, on any process, or `None`."""
        return unknown_code(self._modules_of(model)) or elsewhere(self.trainer, "code", model)

    def _refuse(
        self, causal_lm: PreTrainedModel, options: LogpsOptions, error: RuntimeError, is_multimodal: bool
    ) -> None:
        """
        Remember that a model does not take a layout, and log it once. All processes decide alike, because the decision
        does not depend on the batch.

        Raises:
            `ValueError`, [`CuSeqlensIgnoredError`]: when that layout was asked for.
        """
        ignores_cu_seqlens = isinstance(error, CuSeqlensIgnoredError)
        if options.forces_layout and ignores_cu_seqlens:
            raise error
        if options.forces_layout:
            raise ValueError(
                f"fused_layout={options.layout!r} does not fit this model: {error}. Use 'auto'."
            ) from error
        layout: LayoutName = "aligned" if ignores_cu_seqlens else "padded"
        how = "are aligned instead of packed" if ignores_cu_seqlens else "keep TRL's padding"
        logger.warning(f"Rows {how} from now on, because {error}")
        self._refusals.setdefault(causal_lm, {})[is_multimodal] = Refusal(str(error), layout)

    def compute(
        self,
        logps_request: LogpsRequest,
        call: LogpsArgs,
        trl_method: Callable,
        keeps_padding: str | None = None,
        is_multimodal: bool | None = None,
    ) -> PerTokenLogps:
        """
        Compute log-probabilities of a batch, and what else TRL asks for.

        Args:
            logps_request ([`LogpsRequest`]): at which positions of the batch.
            call ([`LogpsArgs`]): TRL's call.
            trl_method (`Callable`): TRL's own method for it, which knows how images belong to rows.
            keeps_padding (`str`, *optional*): see [`layout`].
            is_multimodal (`bool`, *optional*): whether a process has images, where it is known already.
        """
        unwrapped, accelerator = self.unwrapped(call.model), self.trainer.accelerator
        causal_lm = self.causal_lm(unwrapped)
        self.install(unwrapped)
        vocab_size = vocab_size_of(output_projection(causal_lm), causal_lm)
        check_token_ids(call.completion_ids, logps_request.mask, vocab_size)

        images = multimodal_inputs(call, trl_method) if call.multimodal else None
        if is_multimodal is None:
            (is_multimodal,) = with_images_anywhere(accelerator, causal_lm, [images is not None])
        shape = widest_batch(accelerator, causal_lm, (len(call.input_ids), call.input_ids.shape[1]))
        adapted = fused_adapters(self._modules_of(unwrapped) if self.options.fused_lora else ())
        has_kernels = self.options.fused_kernels and why_not_triton(call.input_ids.device) is None
        compiled = compiling(unwrapped, self.options.fused_compile, has_kernels)
        kept = kept_in_forward(self, logps_request, call, is_multimodal, keeps_padding)
        with accelerator.autocast(), lean_checkpoints(unwrapped, kept), adapted, compiled:
            while True:
                options = self._logps_options(logps_request, call, keeps_padding, is_multimodal, shape)
                if is_multimodal and causal_lm in self._unshared_with_images:
                    options = replace(options, share_prompts=False)
                if options.layout == "packed":
                    install_unpacking(causal_lm)
                if not self._passes_trial(causal_lm, call, options, images, is_multimodal):
                    continue
                if options.layout == "padded":
                    if logps_request.micro_batch is not None:  # they share a forward, but are not to share padding
                        call = replace(call, batch_size=logps_request.micro_batch)
                    return compute_logps(logps_request, options, call, images)
                before = RandomStates(call.input_ids)
                try:
                    return compute_logps(logps_request, options, call, images)
                except PromptsNotSharedError:
                    self._unshared_with_images.add(causal_lm)
                except (RowsRefusedError, CuSeqlensIgnoredError) as error:
                    self._refuse(causal_lm, options, error, is_multimodal)
                before.restore()

    def _logps_options(
        self,
        logps_request: LogpsRequest,
        call: LogpsArgs,
        keeps_padding: str | None,
        is_multimodal: bool,
        shape: tuple[int, int],
    ) -> LogpsOptions:
        causal_lm = self.causal_lm(call.model)
        layout = self.layout(call.model, is_multimodal, keeps_padding, logps_request.reads_padding)
        needs_last_column = traits(causal_lm).needs_last_column
        if layout == "packed" and needs_last_column and call.compute_aux_loss:
            layout = "padded"  # the auxiliary loss counts every token, also one that stands for the last column
        layout = layout_of_width(causal_lm, layout, *shape, is_multimodal, self.options.forces_layout)
        return LogpsOptions(
            causal_lm=causal_lm,
            temperature=trl_compat.temperature_of(self.trainer, self.temperature_when_made),
            fp32=trainers.casts_head(self.trainer),
            backward=self.options.fused_backward,
            logits_mib=self.options.fused_logits_mib,
            layout=layout,
            share_prompts=self.shares_prompts(call.model),
            forces_layout=self.options.forces_layout,
            needs_last_column=needs_last_column,
            processes=self.trainer.accelerator.num_processes,
        )

    def _passes_trial(
        self,
        causal_lm: PreTrainedModel,
        call: LogpsArgs,
        options: LogpsOptions,
        images: MultimodalInputs | None,
        is_multimodal: bool,
    ) -> bool:
        """Whether a layout stands its trials, each of which a model has once. If not, it is refused from now on."""
        if options.layout == "padded":
            return True
        on_any = partial(on_any_process, self.trainer.accelerator, "trial of a layout")
        tried = self._tried(causal_lm).by(self._modules_of(call.model), options.processes)
        try:
            if (options.layout, is_multimodal) not in tried:
                with compiling(causal_lm, is_on=False):  # of other kinds of rows than those that train
                    could_tell = try_rows(call, options, images, on_any)
                if not could_tell:
                    return True  # the batch says nothing of it: the next one may
                tried.add((options.layout, is_multimodal))
            if "padding" not in tried and not is_multimodal and not options.forces_layout:
                tried.add("padding")
                unknown = self.unknown_code(call.model)
                try_layout(causal_lm, self._modules_of(call.model), unknown, call, options, on_any)
        except PromptsNotSharedError:
            self._unshared_with_images.add(causal_lm)
            return False
        except (RowsRefusedError, CuSeqlensIgnoredError) as error:
            self._refuse(causal_lm, options, error, is_multimodal)
            return False
        return True
