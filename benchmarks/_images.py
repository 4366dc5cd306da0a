"""A rollout whose prompts have an image each, handed to TRL as Qwen3-VL's processor would."""

from dataclasses import dataclass
from typing import Any

import torch
from _rollout import Rollout
from torch import Tensor

from trl_fused_grpo.parity.tiny import tokenizer


MERGED = 2  # patches of an image on each side of one token


@dataclass
class ImageRollout(Rollout):
    """
    A [`Rollout`] with one image a prompt; the prompts of a group have the same one.

    Args:
        pixel_values (`Tensor`, *optional*): `[images * patches, channels * 2 * patch * patch]`, float32.
        image_grid_thw (`Tensor`, *optional*): `[images, 3]`, patches of each image.
        image_token_id (`int`): the token that stands for a merged patch.
    """

    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None
    image_token_id: int = -1

    @classmethod
    def of(cls, rollout: Rollout, config: Any, side: int, group: int, seed: int) -> "ImageRollout":
        """Put an image of `side` by `side` pixels before each prompt."""
        vision, count = config.vision_config, side // config.vision_config.patch_size
        start, end = config.vision_start_token_id, config.vision_end_token_id
        tokens = [start, *[config.image_token_id] * (count // MERGED) ** 2, end]
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        rows, generator = len(rollout.prompts), torch.Generator().manual_seed(seed)
        images = torch.randn(rows // group, count * count, width, generator=generator)
        return cls(
            [[*tokens, *prompt] for prompt in rollout.prompts],
            rollout.completions,
            pixel_values=images.repeat_interleave(group, dim=0).flatten(0, 1),
            image_grid_thw=torch.tensor([[1, count, count]] * rows),
            image_token_id=config.image_token_id,
        )

    def processed(self) -> dict[str, Tensor]:
        """What a processor returns for all prompts, beside their ids."""
        assert self.pixel_values is not None and self.image_grid_thw is not None
        is_image = (self.padded("cpu")["prompt_ids"] == self.image_token_id).long()  # [B, P]
        return {
            "pixel_values": self.pixel_values,
            "image_grid_thw": self.image_grid_thw,
            "mm_token_type_ids": is_image,
        }

    def model_inputs(self, device: Any) -> dict[str, Any]:
        """The images as TRL's log-prob method takes them."""
        inputs = self.processed()
        longest = max(map(len, self.completions))
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, longest))
        return {name: value.to(device) for name, value in inputs.items()} | {"num_images": [1] * len(self.prompts)}

    def examples(self) -> list[dict[str, Any]]:
        """The rows of a dataset: a conversation and an image each, which is never looked at."""
        return [{"prompt": [{"role": "user", "content": "w5 w6"}], "image": "served"}] * len(self.prompts)

    def serve(self, trainer: Any) -> None:
        """Have `trainer` take these completions for vLLM's, and these tensors for its processor's."""
        super().serve(trainer)
        trainer.processing_class = _ServedProcessor(self)


class _ServedProcessor:
    """Answers as a processor would that had been given the images of a rollout."""

    def __init__(self, rollout: ImageRollout):
        self.rollout, self.tokenizer = rollout, tokenizer()
        self.chat_template = "{{ messages }}"

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return ""

    def batch_decode(self, *args: Any, **kwargs: Any) -> list[str]:
        return self.tokenizer.batch_decode(*args, **kwargs)

    def __call__(self, **_: Any) -> dict[str, Tensor]:
        return self.rollout.processed()
