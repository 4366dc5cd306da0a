"""Groups of rows whose gradients depend on each other: which rows' logits exist together, and what follows from it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tests.oracle import KnownGroups, relative_error
from trl_fused_grpo import fused_linear_logps
from trl_fused_grpo.ops import linear_logps
from trl_fused_grpo.ops.chunk_size import default_group_mib
from trl_fused_grpo.ops.chunked_linear import ChunkedLinear
from trl_fused_grpo.ops.forecast import RowGroups
from trl_fused_grpo.ops.row_blocks import RowLimits, plan_blocks

from .test_linear_logps import GRAD_ROWS, Problem, assert_close


SIZES = (60, 45, 20, 20, 55)
assert sum(SIZES) == GRAD_ROWS
ENDS = torch.tensor(SIZES).cumsum(0).tolist()

# Where memory is for: (limits, rows recomputed where a group's rows have one gradient, where each has its own)
MEMORY = {
    "every-group": (RowLimits(chunk=25, packed=40, group=60, head_grad=60), 0, 0),
    "one-group-and-a-gradient-of-the-head": (RowLimits(chunk=25, packed=40, group=50, head_grad=30), 0, 60 + 55),
    "short-groups": (RowLimits(chunk=25, packed=40, group=50, head_grad=100), 55, 60 + 55),
    "a-chunk": (RowLimits(chunk=25, packed=25, group=25, head_grad=100), 45 + 55, 60 + 45 + 55),
}


class GroupProblem(Problem):
    """The same rows and head; the loss is an exponential of the mean over each group, and with `own` terms of rows."""

    def __init__(self, own, **options):
        super().__init__(**options)
        self.forecast = KnownGroups(ENDS, self.grad_logps[: len(ENDS)], self.grad_logps if own else None)

    def objective(self, logps, entropies, factor=1.0):
        return self.forecast.loss(logps) * factor


@pytest.mark.parametrize("own", [False, True], ids=["one-gradient-a-group", "own-gradients"])
@pytest.mark.parametrize("memory", MEMORY)
def test_gradients_equal_the_oracle_and_only_what_no_memory_is_for_is_recomputed(memory, own, monkeypatch):
    limits, *expected = MEMORY[memory]
    monkeypatch.setattr(linear_logps.RowLimits, "of", lambda *_: limits)
    problem = GroupProblem(own)
    values, stats = problem.fused(problem.forecast, factor=0.125, backward="forecast")
    assert_close(values, problem.truth(factor=0.125), 2e-6)
    assert (stats.backward, stats.recomputed) == ("forecast", expected[own])


def test_where_there_is_memory_for_few_groups_all_rows_are_recomputed(monkeypatch):
    monkeypatch.setattr(linear_logps.RowLimits, "of", lambda *_: MEMORY["a-chunk"][0])
    problem = GroupProblem(own=True)
    values, stats = problem.fused(problem.forecast)
    assert_close(values, problem.truth(), 2e-6)
    assert (stats.backward, stats.recomputed) == ("recompute", GRAD_ROWS)


def test_where_there_is_memory_for_half_of_the_rows_the_forecast_is_kept(monkeypatch):
    monkeypatch.setattr(linear_logps.RowLimits, "of", lambda *_: MEMORY["a-chunk"][0])
    problem = GroupProblem(own=False)
    _, stats = problem.fused(problem.forecast)
    assert (stats.backward, stats.recomputed) == ("forecast", GRAD_ROWS / 2)


def test_a_wrong_forecast_of_groups_still_gives_the_right_gradients(monkeypatch):
    monkeypatch.setattr(linear_logps.RowLimits, "of", lambda *_: MEMORY["one-group-and-a-gradient-of-the-head"][0])
    problem = GroupProblem(own=True)
    problem.forecast.groups = RowGroups(ENDS, have_equal_grads=True)  # they are not
    values, stats = problem.fused(problem.forecast)
    assert_close(values, problem.truth(), 3e-6)
    assert stats.recomputed > 0


@pytest.mark.parametrize("memory", MEMORY)
def test_bfloat16_errors_are_as_without_groups(memory, monkeypatch):
    problem = GroupProblem(own=False, dtype=torch.bfloat16, bias=False)
    truth = problem.truth()
    errors = []
    for forecast, limits in ((None, MEMORY["a-chunk"][0]), (problem.forecast, MEMORY[memory][0])):
        monkeypatch.setattr(linear_logps.RowLimits, "of", lambda *_, limits=limits: limits)
        values, _ = problem.fused(forecast)
        errors.append([relative_error(value, true) for value, true in zip(values, truth, strict=True)])
    for with_groups, without in zip(errors[1], errors[0], strict=True):
        assert with_groups <= 1.1 * without


def test_log_probs_have_the_same_bits_without_gradient():
    problem = GroupProblem(own=False)
    options = {"forecast": problem.forecast, "logits_mib": 0.05, "group_mib": 0.1}
    rows = problem.hidden, problem.head(), problem.targets
    logps, entropies = fused_linear_logps(*rows, **options)
    with torch.no_grad():
        others = fused_linear_logps(*rows, **options)
    assert torch.equal(logps, others[0]) and torch.equal(entropies, others[1])


def test_a_frozen_head_needs_no_groups(monkeypatch):
    heights = []
    compute = ChunkedLinear.compute_logits

    def recorded(self, rows):
        heights.append(rows.stop - rows.start)
        return compute(self, rows)

    monkeypatch.setattr(ChunkedLinear, "compute_logits", recorded)
    problem = GroupProblem(own=True, frozen=True)
    values, stats = problem.fused(problem.forecast)
    assert_close(values, problem.truth(), 2e-6)
    assert (stats.backward, stats.recomputed, max(heights)) == ("frozen", 0, 25)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("memory", MEMORY)
def test_every_row_is_in_one_block_and_blocks_hold_whole_groups_in_their_memory(memory, equal):
    limits = MEMORY[memory][0]
    blocks = plan_blocks(230, GRAD_ROWS, RowGroups(ENDS, equal), limits)
    rows = [row for block in blocks for part in block.parts for row in range(part.start, part.stop)]
    assert sorted(rows) == list(range(230))
    bounds = [0, *ENDS]
    for block in blocks:
        if block.rows.start >= GRAD_ROWS:
            assert block.assumes == "none"
            continue
        groups = bounds.index(block.rows.stop) - bounds.index(block.rows.start)
        whole = block.assumes == "forecast"
        most = limits.chunk if not whole else limits.group if groups == 1 else limits.packed
        assert max(part.stop - part.start for part in block.parts) <= most
        assert whole or groups == 1
    order = [block.assumes for block in blocks]
    assert order == sorted(order, key=["equal", "forecast", "none"].index)
    # Only the first gradient of a group needs no memory of its own
    assert limits.head_grad <= limits.group or order.count("equal") <= 1


@pytest.mark.parametrize("hidden_size", [1024, 2048, 2560], ids=["0.6B", "1.7B", "4B"])
def test_by_default_there_is_memory_for_any_sequence_of_a_micro_batch_of_four_with_4096_tokens(hidden_size):
    memory = default_group_mib(hidden_size, tokens=4 * (4096 + 256))
    limits = RowLimits.of(151_936, 2, 256, memory, head_grad_bytes=4 * 151_936 * hidden_size)
    assert limits.head_grad <= limits.group
    blocks = plan_blocks(4 * 4096, 4 * 4096, RowGroups([4096, 8192, 12_288, 16_384], have_equal_grads=True), limits)
    assert all(block.assumes != "none" for block in blocks)


@pytest.mark.parametrize(("config", "width"), [(LlamaConfig, 896), (Qwen2Config, 1024), (Qwen3Config, 768)])
def test_a_decoder_layer_keeps_more_for_its_backward_than_the_logits_of_a_sequence_may_take(config, width):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
    options = config(vocab_size=99, num_hidden_layers=1, hidden_size=256, intermediate_size=width, **heads)
    model = AutoModelForCausalLM.from_config(options, attn_implementation="sdpa").bfloat16().model
    hidden = torch.randn(1, 512, 256).bfloat16().requires_grad_()
    position_ids = torch.arange(512).unsqueeze(0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    factors = model.rotary_emb(hidden, position_ids)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.layers[0](hidden, position_embeddings=factors, position_ids=position_ids)
    size = sum(size for pointer, size in kept.items() if pointer not in weights)
    assert size / 2**20 > default_group_mib(256, tokens=512)
