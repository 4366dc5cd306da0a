"""The arithmetic example: what its reward says, and that a short run trains, measures and draws."""

import importlib.util
import logging
import operator
import sys
from pathlib import Path

import pytest
import torch
import transformers
import trl
import typer

from trl_fused_grpo import FusedGRPOTrainer

from . import small


pytest.importorskip("matplotlib")
pytestmark = pytest.mark.example

PNG = b"\x89PNG\r\n"
SCRIPT = Path(__file__).parents[2] / "examples" / "train_arithmetic.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_arithmetic", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    verbosity, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)
    logging.disable(logging.NOTSET)
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("prompt", "completion", "reward"),
    [
        ("37+48=", "085", 1.0),
        ("37+48=", "0 8 5", 1.0),  # as the tokenizer decodes it
        ("37+48=", "075", 0.0),
        ("37+48=", "85", 0.0),
        ("37+48=", "0855", 0.0),
        ("99+99=", "198", 1.0),
        ("00+00=", "000", 1.0),
        ("00+00=", "", 0.0),
    ],
)
def test_reward_is_one_for_the_right_sum_only(example, prompt, completion, reward):
    assert example.correct_sum(prompts=[prompt], completions=[completion], completion_ids=[[0]]) == [reward]


@pytest.mark.parametrize(("a", "b", "written"), [(37, 48, "075"), (37, 42, "079"), (99, 99, "188"), (50, 60, "110")])
def test_careless_pupil_forgets_the_carry_into_the_tens(example, a, b, written):
    assert example.Sum(a, b).without_carry == written


def test_held_out_sums_are_not_trained_on(example):
    sums, held_out = example.draw_sums(seed=0)
    assert len({*sums, *held_out}) == len(sums) + len(held_out) == 10_000
    assert len(held_out) == example.HELD_OUT


def test_tokenizer_reads_a_sum_character_by_character(example):
    tokenizer = example.make_tokenizer()
    ids = tokenizer("37+48=085").input_ids
    assert len(ids) == 9
    assert tokenizer.decode(ids).replace(" ", "") == "37+48=085"


@pytest.fixture
def start(example):
    transformers.set_seed(0)
    tokenizer = example.make_tokenizer()
    model = example.make_model(tokenizer)
    sums, held_out = example.draw_sums(seed=0)
    return model, tokenizer, sums, held_out[:50]


@torch.no_grad()
def answer_loss(model, tokenizer, sums):
    """Mean cross-entropy of the right answers, in nats per token."""
    written = tokenizer([each.prompt + each.answer for each in sums], return_tensors="pt").input_ids.to(model.device)
    labels = written.clone()
    labels[:, : len(sums[0].prompt)] = -100
    return model(written, labels=labels).loss.item()


@pytest.mark.nightly
def test_pretraining_learns_to_answer(example, start):
    model, tokenizer, sums, held_out = start
    before = answer_loss(model, tokenizer, held_out)
    ticks = []
    example.pretrain(model, tokenizer, sums, steps=20, tick=lambda: ticks.append(1))
    assert answer_loss(model, tokenizer, held_out) < 0.8 * before
    assert len(ticks) == 20


def test_short_training_logs_what_stock_logs_and_recomputes_nothing(example, start, monkeypatch, tmp_path):
    """The reward here is the share of right digits: so short a pre-training gets no sum right."""
    model, tokenizer, sums, held_out = start
    example.pretrain(model, tokenizer, sums, steps=20)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    logs = []

    def right_digits(prompts, completions, **_):
        pairs = zip(prompts, (completion.replace(" ", "") for completion in completions), strict=True)
        written = [(example.Sum(*map(int, prompt.rstrip("=").split("+"))).answer, text) for prompt, text in pairs]
        return [sum(map(operator.eq, answer, text)) / len(answer) for answer, text in written]

    def keep(ticker, args, state, control, **_):
        logs.append([entry for entry in state.log_history if "reward" in entry])

    monkeypatch.setattr(example, "correct_sum", right_digits)
    monkeypatch.setattr(example.Ticker, "on_train_end", keep, raising=False)

    def run(trainer_class):
        return example.train(
            trainer_class, model, tokenizer, sums, held_out, steps=3, seed=0, per_device_train_batch_size=64
        )

    fused, stock = run(FusedGRPOTrainer), run(trl.GRPOTrainer)
    assert len(fused.rewards) == len(stock.rewards) == 3
    assert all(0 <= reward <= 1 for reward in fused.rewards)
    small.assert_same(*logs, steps=3)  # one seed and one start: the same samples
    assert fused.accuracy == stock.accuracy
    assert fused.recomputed == [0.0] * 3
    assert stock.recomputed == []
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())

    path = tmp_path / "curve.png"
    example.draw_curve([fused, stock], path)
    assert path.read_bytes().startswith(PNG)


@pytest.mark.nightly
def test_command_fails_when_accuracy_does_not_rise(example, tmp_path, capsys):
    with pytest.raises(typer.Exit) as exit_info:
        example.main(steps=1, pretrain_steps=1, seed=0, curve=tmp_path / "curve.png")
    assert exit_info.value.exit_code == 1
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
