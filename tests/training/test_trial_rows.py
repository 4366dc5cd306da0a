"""A model is tried on a few short sequences, in no more columns than these and some padding need."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.modeling.test_first_batch import deaf, with_mlp
from tests.tiny_training import make_trainer
from tests.training.sampler import use_sampler
from trl_fused_grpo.training import engine, trial, trial_rows
from trl_fused_grpo.training.logps_request import LogpsArgs


def batch(prompts, completions, prompt_length, length):
    """Ids that are their own positions in a sequence, prompts padded left and completions right."""
    mask = torch.zeros(len(prompts), prompt_length + length, dtype=torch.long)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        mask[row, prompt_length - prompt : prompt_length + completion] = 1
    return LogpsArgs(nn.Identity(), mask.cumsum(1) * mask, mask, length, None, False, False, {})


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=2, max_size=5),
    most=st.integers(1, 50),
    spare=st.tuples(st.integers(0, 5), st.integers(0, 40)),
    data=st.data(),
)
def test_a_narrowed_batch_has_all_tokens_of_the_rows_and_padding_up_to_the_limit(lengths, most, spare, data):
    prompts, completions = zip(*lengths, strict=True)
    call = batch(prompts, completions, max(prompts) + spare[0], max(completions) + spare[1])
    rows = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_rows, "_MOST_COLUMNS", most)
        found = trial_rows.narrowed(call, rows)
    needed = max(prompts[row] for row in rows) + max(completions[row] for row in rows)
    width, before = found.input_ids.shape[1], call.input_ids.shape[1]
    assert width == before if before <= most else needed <= width <= max(most, needed)
    split = width - found.logits_to_keep
    for row in rows:
        mask = found.attention_mask[row]
        assert (mask[:split].sum(), mask[split:].sum()) == (prompts[row], completions[row])
        assert found.input_ids[row][mask.bool()].tolist() == list(range(1, prompts[row] + completions[row] + 1))


def test_padding_is_left_on_both_sides():
    call = batch([2, 3], [4, 5], 20, 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_rows, "_MOST_COLUMNS", 18)
        found = trial_rows.narrowed(call, [0, 1])
    assert found.input_ids.shape == (2, 18)
    assert found.attention_mask[1].tolist() == [0] * 5 + [1] * 8 + [0] * 5


class ByColumn(nn.Module):
    """Adds a vector for the column of the row."""

    def forward(self, hidden):
        columns, features = (torch.arange(size, dtype=hidden.dtype) for size in hidden.shape[1:])
        return hidden + torch.sin(columns.unsqueeze(1) * features)


@pytest.mark.parametrize("make", [deaf(), with_mlp(lambda config: ByColumn())], ids=["deaf", "by-column"])
def test_what_mixes_or_counts_columns_is_found_in_few_columns_too(tmp_path, monkeypatch, make):
    monkeypatch.setattr(trial_rows, "_MOST_COLUMNS", 6)  # rows have up to 12
    messages, widths = [], []
    monkeypatch.setattr(engine.logger, "warning", messages.append)
    original = trial.narrowed

    def narrowed(call, rows):
        found = original(call, rows)
        widths.append((call.input_ids.shape[1], found.input_ids.shape[1]))
        return found

    monkeypatch.setattr(trial, "narrowed", narrowed)
    trainer = make_trainer(tmp_path, model=make(), max_steps=1, per_device_train_batch_size=16)
    use_sampler(trainer)
    trainer.train()
    assert widths and all(few < whole for whole, few in widths)
    assert "from now on" in messages[0] and "hidden states change" in messages[0]
    assert trainer.fused_layout() != "packed"
