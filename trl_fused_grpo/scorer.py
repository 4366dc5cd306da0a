"""The scores of a trainer's batches: which layout its model allows, and the call in its wrappers and precision."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from . import _trl_compat as compat
from .checkpointing import lean_checkpoints
from .checks import check_token_ids, vocab_size_of
from .customisation import changed_module
from .fused_forward import BordersIgnoredError, attach
from .layout import LayoutName, choose, keys_may_repeat
from .lm_head import output_projection
from .question import padding_counts
from .scoring import HostCall, Question, Scores, ScoringOptions, score


logger = logging.get_logger(__name__)

_FORCE = 'If it does not, fused_layout="packed" asks for rows without padding all the same.'


class Scorer:
    """
    Scores batches as the options of a trainer say.

    Args:
        trainer (`GRPOTrainer`): whose models and options they are.
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer: Any = trainer  # its options depend on the host's version
        self.borders_ignored = False

    def option(self, name: str, default: Any) -> Any:
        """An option of [`FusedGRPOConfig`], which the arguments need not be."""
        return getattr(self.trainer.args, name, default)

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """A model in no wrapper but PEFT's."""
        # `unwrap_model` looks for DeepSpeed on the disk each time, where it is not installed
        bare = isinstance(model, PreTrainedModel) or compat.is_peft_model(model)
        return model if bare else self.trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=True)

    def causal_lm(self, model: nn.Module) -> PreTrainedModel:
        """The causal language model inside its wrappers, looked up at every call: FSDP and PEFT replace it."""
        unwrapped = self.unwrapped(model)
        return compat.without_adapter(getattr(unwrapped, "_orig_mod", unwrapped))  # torch.compile

    def shares_prompts(self, model: nn.Module) -> bool:
        """Whether a prompt stands in a packed row once."""
        return self.option("fused_share_prompts", True) and keys_may_repeat(self.causal_lm(model))

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
        conditions = (is_multimodal, padding_counts(self.trainer), self.borders_ignored)
        unwrapped, causal_lm = self.unwrapped(model), self.causal_lm(model)
        wanted = self.option("fused_layout", "auto")
        if wanted == "auto":
            reason = keeps_padding or self.why_rows_are_seen(model)
            if reason is not None:
                logger.warning_once(f"Rows keep TRL's padding, because {reason}. {_FORCE}")
                return "host"
        return choose(wanted, unwrapped, causal_lm, *conditions)

    def why_rows_are_seen(self, model: nn.Module) -> str | None:
        """Why the user's own code may see how rows are laid out in a model, or `None`."""
        found = changed_module(self.unwrapped(model).modules())
        return f"{found} may depend on where a token stands" if found else None

    def scores(
        self, question: Question, call: HostCall, host_seam: Callable, keeps_padding: str | None = None
    ) -> Scores:
        """
        Log-probabilities of a batch, and what else the host asks for.

        Args:
            question ([`Question`]): which positions of the batch.
            call ([`HostCall`]): the host's call.
            host_seam (`Callable`): the host's own method for it, which knows how images go with rows.
            keeps_padding (`str`, *optional*): see [`layout`].
        """
        trainer = self.trainer
        unwrapped = self.unwrapped(call.model)
        causal_lm = self.causal_lm(unwrapped)
        attach(causal_lm)
        vocab_size = vocab_size_of(output_projection(causal_lm), causal_lm)
        check_token_ids(call.completion_ids, question.mask, vocab_size)

        options = ScoringOptions(
            temperature=compat.temperature_of(trainer),
            fp32=trainer.args.cast_lm_head_to_fp32,
            way=self.option("fused_way", "auto"),
            logits_mib=self.option("fused_logits_mib", None),
            layout=self.layout(call.model, bool(call.multimodal), keeps_padding),
            share_prompts=self.shares_prompts(unwrapped),
        )
        rows = (call.input_ids, call.attention_mask, call.logits_to_keep, call.multimodal)
        host_inputs = (lambda: compat.host_model_inputs(host_seam, *rows)) if call.multimodal else None
        with trainer.accelerator.autocast(), lean_checkpoints(unwrapped):
            try:
                return score(question, options, call, host_inputs)
            except BordersIgnoredError as error:
                if self.option("fused_layout", "auto") != "auto":
                    raise
                logger.warning(f"Rows are aligned instead of packed from now on, because {error}")
                self.borders_ignored = True
                return score(question, replace(options, layout="aligned"), call, host_inputs)
