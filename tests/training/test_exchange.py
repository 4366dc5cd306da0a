"""
Sequences that processes exchange: who gets which, when none are moved, and metrics that count who generated them. Two
processes that do it are in `tests/distributed`.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.tiny_training import make_inputs, make_trainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.loss.importance_sampling import SAMPLING_METRICS, SamplingCorrection, SamplingMetrics
from trl_fused_grpo.training import exchange
from trl_fused_grpo.training.exchange import Work, balanced_sources, expected_forwards
from trl_fused_grpo.training.memory import TokenLimits
from trl_fused_grpo.training.plan import why_not_exchanged


SIZE = 4


def make_work(processes, micro_batches=8, seed=0, completions=8, shares=True):
    """Completions of log-normal lengths, some of each prompt, in random order within their process."""
    generator = torch.Generator().manual_seed(seed)
    count = micro_batches * SIZE
    lengths = (600 * torch.randn(processes, count, generator=generator).exp()).long().clamp(8, 4096)
    prompts = torch.arange(processes * count).view(processes, count) // completions
    order = torch.stack([torch.randperm(count, generator=generator) for _ in range(processes)])
    return Work.of(lengths, torch.full_like(lengths, 100), prompts.gather(1, order), 2048, shares)


def loads(work, sources, forwards):
    """The cost of each forward of each process, `[forwards, R]`; a shared prompt once."""
    rows = []
    for start, end in forwards:
        row = []
        for places in sources[:, start * SIZE : end * SIZE]:
            cost, prompts, prompt_cost = (
                getattr(work, n).flatten()[places] for n in ("cost", "prompts", "prompt_cost")
            )
            row.append(int(cost.sum()) + sum(dict(zip(prompts.tolist(), prompt_cost.tolist(), strict=True)).values()))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.double)


@pytest.mark.parametrize("shares", [False, True], ids=["", "shared-prompts"])
@pytest.mark.parametrize("processes", [2, 3, 8])
def test_every_process_gets_as_many_sequences_and_about_as_much_work_in_each_forward(processes, shares):
    work = make_work(processes, shares=shares)
    forwards = expected_forwards(work, SIZE, TokenLimits(16_384, 16_384), [])
    sources = balanced_sources(work, SIZE, forwards)
    kept = torch.arange(sources.numel()).view_as(sources)
    assert torch.equal(sources.flatten().sort().values, kept.flatten())  # nothing is lost
    number = torch.arange(sources.shape[1]) // SIZE
    assert torch.equal(sources % sources.shape[1] // SIZE, number.expand_as(sources))  # each keeps its micro-batch
    assert torch.equal(sources, balanced_sources(work, SIZE, forwards))
    before, after = loads(work, kept, forwards), loads(work, sources, forwards)
    assert len(forwards) > 1
    waiting, waiting_before = ((cost.amax(1) - cost.mean(1)).sum() / cost.mean(1).sum() for cost in (after, before))
    assert waiting < 0.04
    assert waiting_before > 0.1
    assert (sources != kept).double().mean() < 0.25


def test_processes_with_equal_work_keep_their_sequences():
    one = make_work(1)
    work = Work(*(value.expand(3, -1) for value in vars(one).values()))
    sources = balanced_sources(work, SIZE, [(0, 8)])
    assert torch.equal(sources, torch.arange(3 * 32).view(3, 32))


def test_a_prompt_that_must_move_along_costs_more_than_it_brings():
    """The other process lacks the prompts, which are much longer than the completions."""
    lengths = torch.tensor([[60, 60, 60, 60], [50, 50, 50, 50]])
    prompts = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])
    for prompt_length, is_moved in ((1000, False), (1, True)):
        work = Work.of(lengths, torch.full_like(lengths, prompt_length), prompts, 2048, share_prompts=True)
        sources = balanced_sources(work, SIZE, [(0, 1)])
        assert (sources != torch.arange(8).view(2, 4)).any() == is_moved


def test_a_sequence_without_completion_costs_nothing():
    work = Work.of(torch.tensor([[0, 3]]), torch.tensor([[5, 5]]), torch.tensor([[1, 1]]), 8, share_prompts=False)
    assert work.tokens.tolist() == [[0, 8]]
    assert work.cost[0, 0] == 0


@pytest.mark.parametrize(
    ("limits", "windows", "expected"),
    [
        ((0, 0), [], [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ((10_000, 10_000), [], [(0, 4)]),
        ((10_000, 10_000), [1, 3], [(0, 1), (1, 3), (3, 4)]),
        ((42, 42), [], [(0, 2), (2, 4)]),  # 8 completions of 4 tokens and one prompt of 8 tokens
        ((58, 42), [], [(0, 2), (2, 4)]),
        ((58, 42), [0], [(0, 3), (3, 4)]),  # 12 completions
        ((58, 42), [1], [(0, 1), (1, 4)]),
    ],
)
def test_forwards_are_expected_as_the_limits_and_the_accumulation_windows_say(limits, windows, expected):
    lengths = torch.full((2, 16), 4)
    work = Work.of(lengths, 2 * lengths, torch.zeros_like(lengths), 2048, share_prompts=True)
    assert expected_forwards(work, SIZE, TokenLimits(*limits), windows) == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"loss_type": "grpo", "beta": 0.1, "top_entropy_quantile": 0.5}, None),
        ({"gradient_accumulation_steps": 1, "steps_per_generation": 2}, None),
        ({"loss_type": "bnpo"}, "bnpo"),
        ({"fused_layout": "padded"}, "packed rows"),
    ],
)
def test_sequences_are_exchanged_only_where_loss_and_metrics_stay_the_same(tmp_path, options, reason):
    trainer = make_trainer(tmp_path, **options)
    asked = trainer, trainer.model, trainer._fused.engine.packs(trainer.model)
    assert why_not_exchanged(*asked) == "there is one process"
    with mock.patch.object(type(trainer.accelerator), "num_processes", 2):
        found, without_means = why_not_exchanged(*asked), why_not_exchanged(*asked, counts_means=False)
        with_images = why_not_exchanged(*asked, has_images=True)
    if reason is None:
        assert without_means is None
        assert with_images == "a generation batch has images"
        reason = None if trl_compat.METRICS_COUNT_ALL_PROCESSES else "means of each process"
    assert found is None if reason is None else reason in found


def test_processes_that_share_sequences_keep_them(tmp_path):
    trainer = make_trainer(tmp_path)
    several = SimpleNamespace(non_data_parallel_size=2)
    accelerator = type(trainer.accelerator)
    with (
        mock.patch.object(accelerator, "parallelism_config", several, create=True),
        mock.patch.object(accelerator, "num_processes", 2),
    ):
        assert "same sequences" in why_not_exchanged(trainer, trainer.model, True)


@pytest.mark.parametrize(
    "field",
    [
        {"pixel_values": torch.ones(7, 3)},
        {"num_images": [1, 1, 1, 1]},
        {"of_unknown_padding": torch.ones(4, 5)},
        {"images": torch.ones(4, 3, 2, 2)},
    ],
    ids=lambda field: next(iter(field)),
)
def test_what_has_no_row_of_known_padding_for_each_sequence_is_not_exchanged(field):
    known = {"old_per_token_logps": torch.ones(4, 8), "importance_sampling_ratio": torch.ones(4, 1), "num_images": None}
    assert exchange._signature([make_inputs(seed=seed, **known) for seed in range(1)]) > 0
    assert exchange._signature([make_inputs(**known) | field]) == 0


@pytest.mark.parametrize("balance", [None, False, True])
def test_one_process_images_or_an_option_leave_sequences_alone(tmp_path, balance, caplog):
    trainer = make_trainer(tmp_path, fused_balance=balance)
    batches = [make_inputs(seed=seed) for seed in range(2)]

    def exchanged(has_images=False):
        return exchange.exchanged(trainer._fused.engine, batches, "packed", [], None, has_images)

    with mock.patch.object(exchange, "exchanged_sequences") as exchanged_sequences:
        assert exchanged() is batches
        with mock.patch.object(type(trainer.accelerator), "num_processes", 2):
            assert exchanged(has_images=True) is batches
            assert not exchanged_sequences.called
            exchanged()
    is_asked = balance is not False and (balance or trl_compat.METRICS_COUNT_ALL_PROCESSES)
    assert exchanged_sequences.called == is_asked
    for reason in ("there is one process", "a generation batch has images"):
        assert caplog.messages.count(f"fused_balance has no effect, because {reason}.") == (balance is True)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_sampling_metrics_are_means_over_what_each_process_generated(mode):
    generator = torch.Generator().manual_seed(0)
    correction = SamplingCorrection(mode, None, 3.0, nan_ratio_is_one=True)
    logps, sampling = torch.randn(2, 2, 4, 5, generator=generator)  # [processes, B, T]
    sampling[0, 1, 2] = float("nan")
    mask = (torch.rand(2, 4, 5, generator=generator) > 0.4).long()
    mask[1, 3] = 0
    ratio = correction.ratio(logps, sampling, mask)

    def logged(generated_by, at):
        """What is logged when the sequences `at` are on each process."""
        collected = []
        for process in range(2):
            metrics = SamplingMetrics()
            values = (value.flatten(0, 1)[at[process]] for value in (logps, sampling, mask, ratio))
            metrics.add(0, correction, *values, generated_by.flatten()[at[process]])
            collected.append(metrics.sequences[0])
        gathered = SimpleNamespace(gather=lambda _: torch.cat(collected), num_processes=2)
        return metrics.gathered(gathered)

    generated_by = torch.tensor([[0] * 4, [1] * 4])
    exchanged = logged(generated_by, torch.tensor([[0, 7, 2, 5], [4, 3, 6, 1]]))
    difference = [(logps - sampling).abs()[r][mask[r].bool()] for r in range(2)]
    difference = [values[~values.isnan()] for values in difference]
    ratios = [ratio[r].flatten() if correction.is_per_sequence else ratio[r][mask[r].bool()] for r in range(2)]
    expected = [
        sum(values.mean() for values in difference) / 2,
        torch.cat(difference).max(),
        torch.cat(ratios).min(),
        sum(values.mean() for values in ratios) / 2,
        torch.cat(ratios).max(),
    ]
    assert exchanged == pytest.approx(dict(zip(SAMPLING_METRICS, map(float, expected), strict=True)), rel=1e-6)
