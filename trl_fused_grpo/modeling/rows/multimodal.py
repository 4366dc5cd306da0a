"""The inputs of a multimodal model: which images belong to which row, and what a packed row takes of them."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trl_fused_grpo._compat import architecture
from trl_fused_grpo._compat.trl_images import IMAGE_INPUTS

from .layout import Layout, PackedRow


class MultimodalInputs:
    """What a multimodal model is called with for a batch of `B` sequences in TRL's padding `[B, P + T]`."""

    def __init__(self, first_rows: Callable[[int], dict[str, Any]], count: int):
        self._first_rows, self.count = first_rows, count

    @cached_property
    def of_batch(self) -> dict[str, Any]:
        """The keyword arguments for the whole batch."""
        return self._first_rows(self.count)

    @cached_property
    def _per_token(self) -> list[str]:
        """
        The inputs that say something of each token, besides its id: `[B, P + T]`. A mask of patches may have that shape
        by chance.
        """
        shape = self.of_batch["input_ids"].shape
        others = {name: value for name, value in self.of_batch.items() if name not in IMAGE_INPUTS}
        return [
            name
            for name, value in others.items()
            if isinstance(value, Tensor) and value.shape == shape and not value.is_floating_point()
        ]

    @cached_property
    def _starts(self) -> dict[str, list[int]] | None:
        """For each tensor of images, where in it the images of each row begin, `B + 1` numbers; `None`: not known."""
        whole = self.of_batch
        names = [name for name, value in whole.items() if isinstance(value, Tensor) and name not in self._per_token]
        parts = [self._first_rows(count) for count in range(1, self.count)] + [whole]
        if any(part.keys() != whole.keys() for part in parts):
            return None
        starts = {name: [0, *(len(part[name]) for part in parts)] for name in names}
        is_rising = all(a <= b for of_name in starts.values() for a, b in pairwise(of_name))
        return starts if is_rising else None

    @property
    def are_known_by_row(self) -> bool:
        """Return `True` if it is known which images belong to which row."""
        return self._starts is not None

    @cached_property
    def rows_with_images(self) -> list[int]:
        """The rows that have images, as far as it is known."""
        starts = (self._starts or {}).values()
        return [row for row in range(self.count) if any(of_name[row] < of_name[row + 1] for of_name in starts)]

    def _images_of(self, rows: Sequence[int]) -> dict[str, Any]:
        """The inputs that are not of single tokens, for these rows in this order."""
        whole = {name: value for name, value in self.of_batch.items() if name not in self._per_token}
        if list(rows) == list(range(self.count)):
            return whole
        assert self._starts is not None, "it is known which images belong to which row"
        chosen = {}
        for name, starts in self._starts.items():
            parts = [whole[name][starts[row] : starts[row + 1]] for row in rows]
            images = torch.cat(parts) if parts else whole[name][:0]
            if len(images):
                chosen[name] = images
        return {name: chosen.get(name) for name in whole}

    def padded(self, rows: Sequence[int]) -> dict[str, Any]:
        """The keyword arguments for some rows in TRL's padding."""
        if list(rows) == list(range(self.count)):
            return self.of_batch
        index = torch.tensor(rows, device=self.of_batch["input_ids"].device)
        return {name: self.of_batch[name][index] for name in self._per_token} | self._images_of(rows)

    def packed(self, layout: Layout, rows: Sequence[int], position_ids: Tensor | None) -> Layout:
        """A packed layout of text with what belongs to its images."""
        row = layout.row
        assert row is not None, "the layout is packed"
        batch = torch.tensor(rows, device=row.index.device)
        with_prompt = [number for number, is_there in zip(rows, row.has_prompt, strict=True) if is_there]
        model_inputs = {**layout.model_inputs, **self._images_of(with_prompt)}
        for name in self._per_token:
            if name not in ("input_ids", "attention_mask"):
                model_inputs[name] = _gather(self.of_batch[name], batch, row)
        if position_ids is not None:
            model_inputs["position_ids"] = _gather(position_ids, batch, row)
        return replace(layout, model_inputs=model_inputs, row=replace(row, has_images=True))

    def position_ids(self, causal_lm: PreTrainedModel) -> Tensor | None:
        """
        Positions of the whole batch in the shape that a model makes them in, for example `[3, B, P + T]` for time,
        height and width; `None` for a model that counts tokens.
        """
        function = getattr(architecture.backbone(causal_lm), "get_rope_index", None)
        if function is None:
            return None
        known = inspect.signature(function).parameters
        try:
            positions, *_ = function(**{name: value for name, value in self.of_batch.items() if name in known})
        except Exception as error:
            owner = type(architecture.backbone(causal_lm)).__name__
            raise ValueError(
                f"{owner}.get_rope_index finds no positions for this batch: do its images match their placeholders in "
                f"the prompts? ({error})"
            ) from error
        return positions

    def image_keys(self, prompts: Sequence[int]) -> Tensor:
        """A number for the images of each row `[B]`, the same where images are."""
        first: dict[int, int] = {}
        pairs = [(row, first.setdefault(prompt, row)) for row, prompt in enumerate(prompts)]
        pairs = [(row, other) for row, other in pairs if row != other]
        keys, device = list(range(self.count)), self.of_batch["input_ids"].device
        if pairs:
            same = [_are_equal(self._images_of([row]), self._images_of([other]), device) for row, other in pairs]
            for (row, other), is_same in zip(pairs, torch.stack(same).tolist(), strict=True):
                keys[row] = other if is_same else row
        return torch.tensor(keys, device=device)

    def may_share_prompts(self, causal_lm: PreTrainedModel, completion_length: int) -> bool:
        """Return `True` if all images are in prompts, as far as it is seen: then a prompt may be shared."""
        types = [self.of_batch[name] for name in self._per_token if name.endswith("token_type_ids")]
        config: Any = causal_lm.config
        ids = [getattr(config, name, None) for name in ("image_token_id", "image_token_index")]
        types += [self.of_batch["input_ids"] == number for number in ids if number is not None]
        return bool(types) and not any(bool(of_token[:, -completion_length:].any()) for of_token in types)


def _are_equal(mine: dict[str, Any], theirs: dict[str, Any], device: torch.device) -> Tensor:
    """Tell if all tensors of two rows are equal, a scalar on `device`."""
    if any((mine[name] is None) != (theirs[name] is None) for name in mine):
        return torch.tensor(False, device=device)
    tensors = [(mine[name], theirs[name]) for name in mine if isinstance(mine[name], Tensor)]
    if any(a.shape != b.shape for a, b in tensors):
        return torch.tensor(False, device=device)
    return torch.stack([torch.tensor(True, device=device), *((a == b).all().to(device) for a, b in tensors)]).all()


def _gather(values: Tensor, rows: Tensor, row: PackedRow) -> Tensor:
    """Gather values of the tokens of a packed row `[..., 1, S]` from the padded batch `[..., B, P + T]`."""
    return values.index_select(-2, rows).flatten(-2)[..., row.index].unsqueeze(-2)
