"""Which images belong to which rows: TRL's own method tells, unless an older one counts rows for images."""

import functools

import pytest
import torch
from trl import GRPOTrainer

from tests.tiny_training import make_trainer
from trl_fused_grpo._compat import trl_images
from trl_fused_grpo._compat.trl_images import MULTIMODAL_INPUTS, multimodal_model_inputs
from trl_fused_grpo.modeling.rows.multimodal import MultimodalInputs
from trl_fused_grpo.parity.tiny.images import FORMATS, IMAGES, image_inputs, with_images


METHOD = GRPOTrainer._get_per_token_logps_and_entropies


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("trainer"), GRPOTrainer)


def entries(name, inputs, rows):
    """How many entries of an image input belong to so many of the first rows."""
    if name.endswith("token_type_ids"):
        return rows
    images = sum(IMAGES[:rows])
    if "num_tiles" in inputs and name != "image_sizes":
        return sum(inputs["num_tiles"][:rows])
    if name == "pixel_values" and "image_grid_thw" in inputs:
        return int(inputs["image_grid_thw"][:images].prod(-1).sum())
    return images


def test_the_inputs_that_go_with_images_are_known():
    """Every TRL names these, whichever of its methods takes them."""
    assert {"pixel_values", "image_grid_thw", "num_images"} <= set(MULTIMODAL_INPUTS)


@pytest.mark.parametrize("name", FORMATS)
def test_the_first_rows_have_their_images_whatever_number_each_has(trainer, name):
    prompts = with_images([[5, 6, 7]] * len(IMAGES), IMAGES, name)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    inputs = image_inputs(name, IMAGES, 1, ids, torch.Generator().manual_seed(0))
    if not inputs.keys() <= set(MULTIMODAL_INPUTS):
        pytest.skip("this TRL does not know the format")
    method = functools.partial(METHOD, trainer)
    for rows in range(1, len(IMAGES) + 1):
        taken = multimodal_model_inputs(method, ids[:rows], ids[:rows], 2, inputs)
        for key in taken.keys() & inputs.keys():
            assert torch.equal(taken[key], inputs[key][: entries(key, inputs, rows)]), (key, rows)


def takes_rows(model, input_ids, attention_mask, logits_to_keep, pixel_values, num_images):
    """What TRL < 1.13 does."""
    model(input_ids=input_ids, pixel_values=pixel_values[: len(input_ids)])


@pytest.mark.parametrize(
    ("images", "shape", "taken"),
    [
        ([1, 1, 1], (3, 2, 3, 8, 8), [1, 2, 3]),  # tiles of the one image of each row
        ([2, 0, 1], (3, 3, 8, 8), None),  # an entry for each image
        ([2, 0, 1], (3, 2, 3, 8, 8), None),  # as many images as rows: entries may be of either
        ([1, 1, 1], (7, 3, 8, 8), None),  # tiles, nobody knows whose
    ],
)
def test_a_trl_that_counts_rows_for_images_is_believed_where_each_has_one(monkeypatch, images, shape, taken):
    monkeypatch.setattr(trl_images, "_COUNTS_ROWS", True)
    ids, multimodal = torch.ones(3, 4, dtype=torch.long), {"num_images": images, "pixel_values": torch.randn(shape)}

    def of_first(rows):
        return multimodal_model_inputs(takes_rows, ids[:rows], ids[:rows], 2, multimodal)

    assert MultimodalInputs(of_first, 3).are_known_by_row == (taken is not None)
    if taken is not None:
        assert [len(of_first(rows)["pixel_values"]) for rows in (1, 2, 3)] == taken
