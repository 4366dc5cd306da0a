"""Images of a micro-batch: as many tokens as the model makes of them, and the same where prompts repeat."""

import pytest
import torch

from trl_fused_grpo.parity.tiny.families import IMAGE_ID
from trl_fused_grpo.parity.tiny.images import FORMATS, IMAGES, REPEATED_IMAGES, image_inputs, with_images


def made(name, images, copies):
    """Prompts of three words with their images, and the image inputs."""
    prompts = with_images([[5, 6, 7]] * len(images), images, name)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    return prompts, image_inputs(name, images, copies, ids, torch.Generator().manual_seed(0))


def rows_of_images(name, inputs):
    """Which rows of the pixels belong to each prompt."""
    images = inputs["num_images"]
    if "image_grid_thw" in inputs:
        sizes = [int(grids.prod(-1).sum()) for grids in inputs["image_grid_thw"].split(images)]
    else:
        sizes = inputs.get("num_tiles", images)
    return inputs["pixel_values"].split(sizes)


@pytest.mark.parametrize("name", FORMATS)
def test_copies_of_a_prompt_have_its_images(name):
    prompts, inputs = made(name, REPEATED_IMAGES, copies=3)
    first, second, third, *others = rows_of_images(name, inputs)
    assert first.numel()
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert prompts[0] == prompts[1] == prompts[2]
    assert not any(torch.equal(first, other) for other in others)
    assert list(map(len, others)) != [len(first)] * 3


@pytest.mark.parametrize("name", FORMATS)
def test_no_two_prompts_have_the_same_images(name):
    _, inputs = made(name, IMAGES, copies=1)
    rows = [row for row in rows_of_images(name, inputs) if len(row)]
    assert len(rows) == sum(count > 0 for count in IMAGES)
    assert not any(torch.equal(one, other) for i, one in enumerate(rows) for other in rows[:i])


@pytest.mark.parametrize("name", FORMATS)
def test_images_have_as_many_tokens_as_places(name):
    prompts, inputs = made(name, IMAGES, copies=1)
    tokens = [prompt.count(IMAGE_ID) for prompt in prompts]
    assert tokens[0] == sum(h * w // FORMATS[name].merged for h, w in map(FORMATS[name].size, range(IMAGES[0])))
    for key in FORMATS[name].type_ids:
        assert inputs[key].sum(1).tolist() == tokens


def test_images_of_some_formats_differ_in_size():
    assert made("patches", IMAGES, copies=1)[1]["image_grid_thw"].unique(dim=0).size(0) == 2
    assert made("padded-pixels", IMAGES, copies=1)[1]["image_sizes"].unique(dim=0).size(0) == 2
    assert 2 in made("tiles", IMAGES, copies=1)[1]["num_tiles"] or 3 in made("tiles", IMAGES, copies=1)[1]["num_tiles"]
    places = made("placed-patches", IMAGES, copies=1)[1]["image_position_ids"]
    assert (places == -1).all(-1).any()
    assert not (places == -1).all(-1).all(-1).any()
