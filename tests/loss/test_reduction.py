"""The weight of each token, by hand for each reduction, and the tokens of a step over several processes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from trl_fused_grpo.loss.batch import GRPOBatch
from trl_fused_grpo.loss.objective import GRPOObjective
from trl_fused_grpo.loss.reduction import luspo_counts_padding, reduce_loss, token_weights, tokens_per_process


LENGTHS = [3, 1, 0]  # of sequences in rows of four; the second counts one token, the last none
MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
NORMALIZER, ACCUMULATION, LONGEST = 5.0, 4.0, 10


def weight_of(reduction, length, normalizer):
    """The weight of a token that counts, in a sequence of a length, without accumulation."""
    tokens, sequences = (sum(LENGTHS), len(LENGTHS)) if normalizer is None else (normalizer, normalizer)
    return {
        "token_mean": 1 / tokens,
        "sequence_mean": 1 / sequences / max(length, 1),
        "fixed_length": 1 / (sequences * LONGEST),
        "sequence_sum": 1 / sequences,
        "sum": 1.0 if normalizer is None else 1 / normalizer,
    }[reduction]


@pytest.mark.parametrize("accumulation", [1.0, ACCUMULATION])
@pytest.mark.parametrize("normalizer", [None, NORMALIZER])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "fixed_length", "sequence_sum", "sum"])
def test_each_token_has_the_weight_of_its_reduction(reduction, normalizer, accumulation):
    objective = GRPOObjective(loss_type="dapo", reduction=reduction, max_completion_length=LONGEST)
    batch = GRPOBatch(MASK, torch.ones(3, 1), normalizer=normalizer, accumulation=accumulation)
    expected = [
        [counts * weight_of(reduction, length, normalizer) / accumulation for counts in row]
        for row, length in zip(MASK.tolist(), LENGTHS, strict=True)
    ]
    assert torch.allclose(token_weights(objective, batch), torch.tensor(expected))


@pytest.mark.parametrize("accumulation", [1.0, ACCUMULATION])
@pytest.mark.parametrize("normalizer", [None, NORMALIZER])
def test_padding_counts_as_the_length_of_its_sequence(normalizer, accumulation):
    objective = GRPOObjective(loss_type="dapo", reduction="padded_sequence_sum")
    batch = GRPOBatch(MASK, torch.ones(3, 1), normalizer=normalizer, accumulation=accumulation)
    sequences = len(LENGTHS) if normalizer is None else normalizer
    expected = torch.tensor(LENGTHS)[:, None].expand(3, 4) / (accumulation * sequences * MASK.shape[1])
    assert torch.allclose(token_weights(objective, batch), expected)


@pytest.mark.parametrize("count", [0, 1])
def test_no_micro_batch_is_divided_by_less_than_one_token(count):
    mask = torch.tensor([[count, 0]])
    for reduction in ("token_mean", "sequence_mean"):
        weights = token_weights(GRPOObjective(reduction=reduction), GRPOBatch(mask, torch.ones(1, 1)))
        assert weights.tolist() == [[float(count), 0.0]]


def test_an_entropy_bonus_without_entropies_is_told():
    batch = GRPOBatch(MASK, torch.ones(3, 1))
    with pytest.raises(AssertionError, match=r"^an entropy bonus needs entropies$"):
        reduce_loss(GRPOObjective(entropy_coef=0.1), batch, torch.ones(3, 4), None)


@pytest.mark.parametrize(
    ("options", "has_kl", "has_token_factors", "expected"),
    [
        ({"loss_type": "luspo"}, False, False, True),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, False, False, False),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, True, False, True),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, False, True, True),
        ({"loss_type": "luspo", "reduction": "sequence_sum"}, True, True, False),
        ({"loss_type": "grpo"}, True, True, False),
    ],
)
def test_luspo_counts_padding_where_its_term_differs_from_token_to_token(options, has_kl, has_token_factors, expected):
    assert luspo_counts_padding(GRPOObjective(**options), has_kl, has_token_factors) is expected


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("given", [None, 12, torch.tensor(12), torch.tensor(12.0, dtype=torch.float64), 1])
def test_tokens_of_a_step_are_those_of_all_processes_by_their_number(processes, given):
    def all_reduce(tokens):
        tokens += 5 * (processes - 1)  # of the others

    with (
        mock.patch.object(dist, "is_initialized", return_value=processes > 1),
        mock.patch.object(dist, "get_world_size", return_value=processes),
        mock.patch.object(dist, "all_reduce", side_effect=all_reduce) as reduced,
    ):
        found = tokens_per_process(MASK, given)
    expected = (int(MASK.sum()) + 5 * (processes - 1)) if given is None else int(given)
    assert reduced.called == (given is None and processes > 1)
    assert found.item() == pytest.approx(max(expected / processes, 1.0))
    assert found.dtype == torch.float32
    assert found.dim() == 0


def test_a_step_without_tokens_counts_one():
    assert tokens_per_process(torch.zeros(2, 3, dtype=torch.long), None).item() == 1.0


@pytest.mark.parametrize("given", [None, 12])
def test_tokens_of_a_step_are_on_the_device_of_the_mask(given):
    assert tokens_per_process(MASK.to("meta"), given).device.type == "meta"
