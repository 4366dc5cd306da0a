"""patch(): every GRPOTrainer that is made gets the fused loss, and back."""

import copy
import inspect
import itertools
import logging
from dataclasses import dataclass

import pytest
import trl
import trl.trainer.grpo_trainer as grpo_trainer
from datasets import Dataset
from trl import GRPOConfig
from trl import GRPOTrainer as Stock

from trl_fused_grpo import FusedGRPOConfig, FusedGRPOTrainer, patch
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.options import patched_options, read_option
from trl_fused_grpo.parity.tiny import tiny_model, tokenizer
from trl_fused_grpo.patching import unpatched

from .tiny_training import make_trainer, reward_length


DATASET = Dataset.from_dict({"prompt": ["w5 w6", "w7"] * 4})


class OwnTrainer(Stock):
    """A trainer of the user's, defined before any patch."""


def names():
    return {trl.GRPOTrainer, trl.trainer.GRPOTrainer, grpo_trainer.GRPOTrainer}


def options_of(trainer):
    return trainer._fused.engine.options


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def warnings_logged(monkeypatch):
    """Warnings that are logged during a test, each once."""
    messages = []

    def keep(self, message, *args, **kwargs):
        if message not in messages:
            messages.append(message)

    monkeypatch.setattr(logging.Logger, "warning_once", keep, raising=False)
    return messages


def test_the_patch_lasts_as_long_as_its_context():
    with patch():
        assert names() == {FusedGRPOTrainer}
    assert names() == {Stock}


def test_undoing_twice_undoes_once():
    handle = patch()
    handle.undo()
    outer = patch()
    handle.undo()
    assert trl.GRPOTrainer is FusedGRPOTrainer
    outer.undo()
    assert trl.GRPOTrainer is Stock


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_patches_are_undone_in_any_order(order):
    handles = [patch(fused_layout="packed"), patch(fused_layout="padded", fused_compile=True), patch()]
    assert patched_options() == FusedOptions(fused_layout="padded", fused_compile=True)
    for left, place in zip((2, 1, 0), order, strict=True):
        handles[place].undo()
        assert names() == ({FusedGRPOTrainer} if left else {Stock})
        assert (patched_options() is None) == (left == 0)


def test_an_inner_patch_ends_with_its_context():
    with patch(fused_layout="packed"):
        with patch(fused_layout="padded"):
            assert patched_options().fused_layout == "padded"
        assert trl.GRPOTrainer is FusedGRPOTrainer
        assert patched_options().fused_layout == "packed"
    assert trl.GRPOTrainer is Stock


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fused_layot": "packed"}, "there is no option 'fused_layot'. The options are fused_compile, "),
        ({"use_liger_loss": True}, "there is no option 'use_liger_loss'"),
        ({"fused_layout": "dense"}, 'fused_layout must be None, "packed" or "padded"'),
        ({"fused_memory": 2}, "fused_memory must be None or a fraction"),
    ],
)
def test_an_option_that_cannot_be_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        patch(**options)
    assert trl.GRPOTrainer is Stock and patched_options() is None


def test_a_name_that_somebody_else_replaced_is_left(monkeypatch, warnings_logged):
    monkeypatch.setattr(trl, "GRPOTrainer", OwnTrainer)
    with patch():
        assert trl.GRPOTrainer is OwnTrainer and grpo_trainer.GRPOTrainer is FusedGRPOTrainer
    assert trl.GRPOTrainer is OwnTrainer and grpo_trainer.GRPOTrainer is Stock
    (message,) = warnings_logged
    assert "it was replaced by tests.test_patching.OwnTrainer before" in message


def test_the_class_of_an_earlier_import_makes_fused_trainers_that_train_as_stock(tmp_path):
    """Also from a plain GRPOConfig of before the patch, which is not changed."""
    options = {"max_steps": 3, "num_iterations": 2}
    stock = make_trainer(tmp_path, Stock, **options)
    stock.train()
    with patch(fused_layout="padded"):
        fused = make_trainer(tmp_path, Stock, **options)
    fused.train()
    assert type(stock) is Stock and type(fused) is FusedGRPOTrainer
    assert losses(fused) == pytest.approx(losses(stock), rel=1e-5, abs=1e-7) and len(losses(stock)) == 3
    assert any("fused/rows_recomputed" in entry for entry in fused.state.log_history)
    # It keeps the options of the patch that it was made under
    assert options_of(fused) == FusedOptions(fused_layout="padded") and fused.fused_layout() == "padded"
    with patch():
        again = Stock(tiny_model("llama"), reward_length, stock.args, DATASET, None, tokenizer())
    assert type(again) is FusedGRPOTrainer and again.use_liger_loss and again.args.use_liger_loss is None


@dataclass
class LayoutConfig(GRPOConfig):
    fused_layout: str = "packed"


def test_what_the_arguments_say_wins(tmp_path, warnings_logged):
    with patch(fused_layout="padded", fused_share_prompts=False, kl_estimator="k1"):
        by_name = make_trainer(tmp_path, trl.GRPOTrainer, config=GRPOConfig, use_liger_loss=False, beta=0.1)
        by_class = make_trainer(tmp_path, Stock, use_liger_loss=False)
        partly = make_trainer(tmp_path, Stock, config=LayoutConfig)
        fully = make_trainer(tmp_path, Stock, config=FusedGRPOConfig)
    assert not by_name.use_liger_loss and options_of(by_name) == FusedOptions()
    assert type(by_class) is Stock
    assert options_of(partly) == FusedOptions(fused_layout="packed", fused_share_prompts=False, kl_estimator="k1")
    assert options_of(fully) == FusedOptions()
    assert [message for message in warnings_logged if "patch" in message] == []


def test_under_a_patch_the_flag_is_the_switch(tmp_path):
    with patch():
        for said, is_on in ((None, True), (True, True), (False, False)):
            trainer = make_trainer(tmp_path, trl.GRPOTrainer, config=GRPOConfig, use_liger_loss=said)
            assert trainer.use_liger_loss is is_on


def test_a_trainer_without_arguments_of_its_own_is_fused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = GRPOConfig.__init__
    monkeypatch.setattr(
        GRPOConfig, "__init__", lambda self, *a, **k: made(self, *a, **{**k, "use_cpu": True, "bf16": False})
    )
    with patch():
        trainer = Stock(tiny_model("llama"), reward_length, train_dataset=DATASET, processing_class=tokenizer())
    assert type(trainer) is FusedGRPOTrainer and trainer.use_liger_loss


def test_a_subclass_of_before_trains_as_stock_and_that_is_said_once(tmp_path, warnings_logged):
    with patch():
        for _ in range(2):
            assert type(make_trainer(tmp_path, OwnTrainer, config=GRPOConfig)) is OwnTrainer
        make_trainer(tmp_path, OwnTrainer, config=GRPOConfig, use_liger_loss=False)

        class Meanwhile(trl.GRPOTrainer):
            pass

        assert make_trainer(tmp_path, Meanwhile, config=GRPOConfig).use_liger_loss
    assert make_trainer(tmp_path, Meanwhile, config=GRPOConfig).use_liger_loss  # its base is the fused trainer
    (message,) = [message for message in warnings_logged if "patch" in message]
    assert message.startswith("OwnTrainer was defined before trl_fused_grpo.patch() and trains with TRL's own loss")


def test_stock_says_once_that_it_does_not_heed_the_flag(tmp_path, warnings_logged):
    for cls, said in ((Stock, True), (Stock, True), (OwnTrainer, True), (Stock, None), (Stock, False)):
        make_trainer(tmp_path, cls, config=GRPOConfig, use_liger_loss=said)
    make_trainer(tmp_path)
    messages = [message for message in warnings_logged if "use_liger_loss" in message]
    assert [message.partition(":")[0] for message in messages] == [
        "use_liger_loss=True has no effect on GRPOTrainer",
        "use_liger_loss=True has no effect on OwnTrainer",
    ]


def test_trls_class_shows_its_own_signature_and_its_trainers_can_be_copied(tmp_path):
    assert list(inspect.signature(Stock).parameters)[:3] == ["model", "reward_funcs", "args"]
    trainer = make_trainer(tmp_path, Stock, use_liger_loss=False)
    with patch():
        assert type(copy.copy(trainer)) is Stock


def test_patches_rest_where_stock_is_needed():
    with patch(fused_layout="packed") as handle:
        with unpatched():
            assert names() == {Stock} and patched_options() is None
        assert names() == {FusedGRPOTrainer} and patched_options().fused_layout == "packed"
        handle.undo()
        with unpatched():
            pass
        assert names() == {Stock}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("fused_layout", "packed", "packed"),
        *(("fused_compile", text, True) for text in ("true", "Yes", "1", "t")),
        *(("fused_share_prompts", text, False) for text in ("false", "no", "0", "N")),
        ("fused_memory", "0.5", 0.5),
        ("fused_max_tokens_per_forward", "0", 0),
        ("fused_skip_old_logps", "none", None),
    ],
)
def test_an_option_is_read_from_text(name, text, value):
    assert read_option(name, text) == value and type(read_option(name, text)) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("fused_layout", "dense", "fused_layout must be"),
        ("fused_compile", "maybe", "fused_compile must be None, True or False, not 'maybe'"),
        ("fused_memory", "half", "fused_memory must be None or a fraction above 0 and at most 1, not 'half'"),
        (
            "fused_max_tokens_per_forward",
            "1.5",
            "fused_max_tokens_per_forward must be None or a whole number from 0 on, not '1.5'",
        ),
    ],
)
def test_text_that_is_no_option_is_refused(name, text, message):
    with pytest.raises(ValueError, match=message):
        read_option(name, text)
