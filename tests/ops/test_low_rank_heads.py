"""Low-rank terms beside the head's weight, in each backward mode, against dense logits in float64; tiles and blocks."""

import pytest
import torch
import torch.nn.functional as F

from tests.oracle import KnownGradients, relative_error
from trl_fused_grpo import LMHead, fused_linear_logps
from trl_fused_grpo.ops.forecast import RowGroups
from trl_fused_grpo.ops.lm_head import LowRank
from trl_fused_grpo.ops.recompute import _tile_shape
from trl_fused_grpo.ops.row_blocks import RowLimits, plan_blocks


N, H, V = 50, 24, 131


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def leaves_of(ranks, frozen, bias):
    weight = randn(V, H, seed=1).requires_grad_(not frozen)
    factors = [randn(*shape, seed=2 + i).requires_grad_() for i, r in enumerate(ranks) for shape in ((r, H), (V, r))]
    hidden = (3 * randn(N, H, seed=0)).requires_grad_()
    return hidden, weight, randn(V, seed=9).requires_grad_(not frozen) if bias else None, factors


@pytest.mark.parametrize("temperature", [0.7, "by-row"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("ranks", [(3,), (2, 5)], ids=["one", "two"])
@pytest.mark.parametrize("mode", ["forecast", "wrong-forecast", "recompute", "auto"])
def test_low_rank_terms_and_their_gradients(mode, ranks, frozen, bias, temperature):
    hidden, weight, bias, factors = leaves_of(ranks, frozen, bias)
    temperature = 0.5 + torch.rand(N, generator=torch.Generator().manual_seed(7)) if temperature == "by-row" else 0.7
    targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(8))
    grads = randn(N, seed=11)
    terms = tuple(LowRank(a, b, scale) for a, b, scale in zip(factors[::2], factors[1::2], (0.5, 2.0), strict=False))
    forecast = None
    if mode.endswith("forecast"):
        forecast = KnownGradients(grads * (torch.linspace(0.5, 1.5, N) if mode.startswith("wrong") else 1.0), None, N)
    logps, _ = fused_linear_logps(
        hidden,
        LMHead(weight, bias, low_rank=terms),
        targets,
        temperature,
        forecast,
        backward="recompute" if mode == "recompute" else "auto",
        logits_mib=0.004,
    )
    wanted = [leaf for leaf in (hidden, weight, bias, *factors) if leaf is not None and leaf.requires_grad]
    found = [logps, *torch.autograd.grad((logps * grads).sum(), wanted)]

    exact = {id(leaf): leaf.detach().double().requires_grad_() for leaf in wanted}

    def of(leaf):
        return exact.get(id(leaf), leaf.detach().double())

    whole = of(weight) + sum(term.scale * of(term.b) @ of(term.a) for term in terms)
    logits = F.linear(of(hidden), whole, None if bias is None else of(bias))
    logits = logits / (temperature.unsqueeze(1) if isinstance(temperature, torch.Tensor) else temperature)
    truth = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    expected = [truth, *torch.autograd.grad((truth * grads).sum(), list(exact.values()))]
    errors = [float(relative_error(mine, true)) for mine, true in zip(found, expected, strict=True)]
    assert max(errors) < 2e-5, errors


@pytest.mark.parametrize("rows", [1, 7, 300, 5000])
@pytest.mark.parametrize("vocabulary", [100, 1000, 32_000, 151_936])
@pytest.mark.parametrize("chunk_rows", [1, 16, 1024])
def test_a_tile_takes_no_more_memory_than_a_chunk_of_logits(rows, vocabulary, chunk_rows):
    tile_rows, columns = _tile_shape(rows, vocabulary, chunk_rows)
    assert 1 <= tile_rows <= rows
    assert 1 <= columns <= vocabulary
    assert columns == vocabulary or columns % 128 == 0
    assert tile_rows * columns <= max(chunk_rows * vocabulary, columns)
    if tile_rows < rows:  # no more rows would fit
        assert (tile_rows + 1) * columns > chunk_rows * vocabulary


def test_groups_are_joined_where_they_follow_each_other_and_fit_the_largest_block_first():
    limits = RowLimits(chunk=5, packed=10, group=20, head_grad=1000)
    groups = RowGroups([3, 7, 10, 22, 24, 30, 31, 60])  # of 3, 4, 3, 12, 2, 6, 1 and 29 rows
    blocks = plan_blocks(64, 60, groups, limits)
    assert [(block.rows.start, block.rows.stop, block.assumes) for block in blocks] == [
        *((10, 22, "forecast"), (0, 10, "forecast"), (22, 31, "forecast")),
        (31, 60, "none"),
        (60, 64, "none"),
    ]


def test_empty_groups_make_no_block():
    limits = RowLimits(chunk=5, packed=10, group=20, head_grad=1000)
    blocks = plan_blocks(4, 4, RowGroups([0, 4, 4]), limits)
    assert [(block.rows.start, block.rows.stop) for block in blocks] == [(0, 4)]
    assert plan_blocks(0, 0, RowGroups([0]), limits) == []


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((1000, 151_936, 100), (1000, 13_824)),  # 15193 columns fit beside all rows: eleven tiles of even size
        ((50_000, 151_936, 8192), (50_000, 15_232)),  # the widest: ten
        ((1, 10_000, 1), (1, 10_000)),
    ],
)
def test_tiles_are_as_wide_as_all_rows_allow_and_of_even_size(shape, tile):
    assert _tile_shape(*shape) == tile


def test_inputs_without_further_columns_are_not_copied_and_columns_have_the_dtype_of_the_hidden_states():
    hidden, weight, _, (a, b) = leaves_of((3,), frozen=True, bias=False)
    assert LMHead(weight).linear_inputs(hidden, 1.0).hidden is hidden
    head = LMHead(weight.bfloat16(), low_rank=(LowRank(a, b),))  # as PEFT makes adapters, in float32
    for temperature in (1.0, torch.ones(N)):
        inputs = head.linear_inputs(hidden.bfloat16(), temperature)
        assert inputs.hidden.dtype == torch.bfloat16 and inputs.lora_b is b


def test_a_temperature_for_each_row_with_a_softcap_raises_with_what_to_pass():
    with pytest.raises(ValueError, match="pass one number for all rows"):
        LMHead(torch.zeros(V, H), softcap=5.0).linear_inputs(torch.zeros(N, H), torch.ones(N))


def test_blocks_without_groups_are_chunks_and_rows_without_gradient_assume_none():
    limits = RowLimits(chunk=4, packed=10, group=20, head_grad=1000)
    blocks = plan_blocks(11, 6, None, limits)
    assert [(block.rows, block.parts, block.assumes) for block in blocks] == [
        (rows, [rows], assumes)
        for rows, assumes in (
            *((slice(0, 4), "forecast"), (slice(4, 6), "forecast")),
            *((slice(6, 10), "none"), (slice(10, 11), "none")),
        )
    ]


def test_a_group_of_one_gradient_is_whole_only_where_its_logits_take_no_more_than_a_gradient_of_the_head():
    limits = RowLimits(chunk=4, packed=5, group=20, head_grad=10)
    blocks = plan_blocks(32, 32, RowGroups([10, 21, 32], have_equal_grads=True), limits)
    assert [(block.rows.stop, block.assumes) for block in blocks] == [(21, "equal"), (32, "equal"), (10, "forecast")]


def test_limits_by_hand():
    two_mib = {"vocab_size": 2**10, "itemsize": 2, "logits_mib": 2}  # a row is 2 KiB
    assert RowLimits.of(**two_mib, group_mib=None, head_grad_bytes=4097) == RowLimits(1024, 1024, 1024, 3)
    assert RowLimits.of(**two_mib, group_mib=5.001, head_grad_bytes=4096) == RowLimits(1024, 2048, 2560, 2)
    assert RowLimits.of(**two_mib, group_mib=0.5, head_grad_bytes=1) == RowLimits(1024, 1024, 1024, 1)
