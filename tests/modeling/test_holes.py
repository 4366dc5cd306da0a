"""Holes in the attention mask: rows that are not one sequence keep TRL's padding."""

import pytest
import torch
from transformers import LlamaConfig

from tests.layout_pairs import SHAPE, assert_trains_as_stock, from_config, log_probs, make_pair, seeded, short_rows
from tests.oracle import relative_error
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.training import engine


def in_a_completion(inputs):
    inputs["completion_mask"][5, 2] = 0
    inputs["completion_mask"][8, 1:4] = 0


def in_a_prompt(inputs):
    inputs["prompt_mask"][:] = torch.tensor([1, 0, 1])


def at_the_end_of_a_prompt(inputs):
    inputs["prompt_mask"][:, -1] = 0


def at_the_start_of_a_completion(inputs):
    inputs["completion_mask"][[4, 5, 6], 0] = 0


def where_a_whole_prompt_is(inputs):
    inputs["prompt_mask"][6:] = 0


HOLES = [in_a_completion, in_a_prompt, at_the_end_of_a_prompt, at_the_start_of_a_completion, where_a_whole_prompt_is]


@pytest.fixture
def layouts(monkeypatch):
    """The layouts that the model was called with."""
    names = []
    run = engine.run_model

    def spy(model, layout, *args):
        names.append("padded" if layout.row is None else "packed")
        return run(model, layout, *args)

    monkeypatch.setattr(engine, "run_model", spy)
    return names


def pair(tmp_path, **options):
    return make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)), **options)


@pytest.mark.sample(4)
@pytest.mark.parametrize("shares", [False, True], ids=["", "shared-prompts"])
@pytest.mark.parametrize("dig", HOLES)
def test_a_hole_in_the_mask_keeps_the_padding(tmp_path, dig, shares, layouts):
    fused, stock = pair(tmp_path, fused_share_prompts=shares)
    inputs = short_rows(old_per_token_logps=torch.full((9, 8), -6.9))
    dig(inputs)
    assert_trains_as_stock(fused, stock, inputs)
    assert layouts == ["padded"]
    inputs = short_rows(old_per_token_logps=torch.full((9, 8), -6.9))
    assert_trains_as_stock(fused, stock, inputs)
    assert layouts == ["padded", "packed"]  # it is the batch's, not the model's


def test_a_layout_that_was_asked_for_raises(tmp_path):
    fused, _ = pair(tmp_path, fused_layout="packed")
    inputs = short_rows()
    in_a_completion(inputs)
    with pytest.raises(ValueError, match="fused_layout='packed' does not fit this batch: there are holes"):
        seeded(fused, inputs)


@pytest.mark.skipif(trl_compat.COMPUTES_LOGPS_OF_PADDING, reason="this TRL's log-probs of padding may be read")
def test_only_sub_batches_with_holes_are_padded(tmp_path, layouts):
    fused, stock = pair(tmp_path, fused_share_prompts=False)
    inputs = short_rows()
    in_a_completion(inputs)
    expected = log_probs(stock, inputs, batch_size=3)
    assert relative_error(log_probs(fused, inputs, batch_size=3), expected) < 1e-5
    assert sorted(set(layouts)) == ["packed", "padded"]


def test_empty_rows_and_completions_are_no_holes(tmp_path, layouts):
    fused, stock = pair(tmp_path)
    inputs = short_rows(old_per_token_logps=torch.full((9, 8), -6.9))
    inputs["completion_mask"][[2, 5]] = 0
    inputs["prompt_mask"][[0, 5]] = 0  # an empty row; the first has no completion either
    assert inputs["completion_mask"][0].sum() == 0
    assert_trains_as_stock(fused, stock, inputs)
    assert layouts == ["packed"]


def test_a_hole_in_a_row_without_tokens_in_the_loss_does_not_matter(tmp_path, layouts):
    fused, stock = pair(tmp_path)
    inputs = short_rows(old_per_token_logps=torch.full((9, 8), -6.9))
    inputs["prompt_mask"][0] = torch.tensor([1, 0, 1])  # it has no completion
    assert_trains_as_stock(fused, stock, inputs)
    assert layouts == ["packed"]


def test_a_batch_without_any_token_runs(tmp_path):
    fused, stock = pair(tmp_path)
    inputs = short_rows(old_per_token_logps=torch.full((9, 8), -6.9))
    inputs["completion_mask"][:] = 0
    inputs["prompt_mask"][0] = 0
    assert seeded(fused, inputs)[0] == seeded(stock, inputs)[0] == 0
