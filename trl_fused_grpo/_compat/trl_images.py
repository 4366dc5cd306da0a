"""
With which images TRL calls a multimodal model, in each of its versions. Each entry says what differs, since when or
until when; it can be removed when the oldest supported version has passed that.
"""

import inspect
from collections.abc import Callable
from typing import Any

from packaging.version import Version
from torch import Tensor
from trl import GRPOTrainer

from .required import TRL


# TRL 1.14 names the arguments of its log-prob method in the method that it calls
_LOGPS_METHOD = getattr(GRPOTrainer, "_full_logits_logps", GRPOTrainer._get_per_token_logps_and_entropies)
# The inputs of a micro-batch that go with images, as the log-prob method names them: they differ by the version
MULTIMODAL_INPUTS = tuple(
    name
    for name in list(inspect.signature(_LOGPS_METHOD).parameters)[5:]
    if name not in ("batch_size", "compute_entropy", "compute_aux_loss")
)
# Those that say something of images, and not of each token
IMAGE_INPUTS = tuple(name for name in MULTIMODAL_INPUTS if not name.endswith("token_type_ids"))


class _ModelCallError(Exception):
    def __init__(self, model_inputs: dict[str, Any]):
        self.model_inputs = model_inputs


def multimodal_model_inputs(
    trl_method: Callable, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, multimodal: dict[str, Any]
) -> dict[str, Any]:
    """
    The keyword arguments with which TRL would call a multimodal model for these rows, the first of a batch. Each
    version selects images in its own way, so TRL's own method is run up to that call. Images are missing where it may
    select those of other rows for a part of the batch.
    """

    def model(**model_inputs):
        raise _ModelCallError(model_inputs)

    try:
        trl_method(model, input_ids, attention_mask, logits_to_keep, **multimodal)
    except _ModelCallError as call:
        not_the_backbones = ("labels", "logits_to_keep", "fused_lm_head", "use_cache")
        model_inputs = {name: value for name, value in call.model_inputs.items() if name not in not_the_backbones}
        return _without_images_of_others(model_inputs, len(input_ids), multimodal)
    raise RuntimeError("TRL computed log-probs without calling the model")


# TRL < 1.13 (1.8 is known to, 1.13 not to) takes as many images as rows, whatever number of images each row has, unless
# one of these arguments tells which are whose
_COUNTS_ROWS = Version("1.13.0") > TRL
_TELL_IMAGES = ("image_grid_thw", "image_position_ids", "spatial_shapes")


def _without_images_of_others(model_inputs: dict[str, Any], count: int, multimodal: dict[str, Any]) -> dict[str, Any]:
    """The arguments of these rows, without images where TRL may have taken those of other rows."""
    per_row = multimodal.get("num_images")
    is_told = any(multimodal.get(name) is not None for name in _TELL_IMAGES)
    if not _COUNTS_ROWS or per_row is None or count == len(per_row) or is_told:
        return model_inputs
    if set(per_row) == {1} and len(multimodal["pixel_values"]) == len(per_row):  # an entry for each row
        return model_inputs
    return {name: value for name, value in model_inputs.items() if name not in IMAGE_INPUTS}
