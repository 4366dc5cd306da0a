"""The plugin of axolotl: against axolotl itself where it is installed, else against a stand-in for it."""

import importlib
import importlib.util
import sys
from dataclasses import fields

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests.tiny_training import make_trainer, reward_length
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo.config import FusedOptions
from trl_fused_grpo.parity.tiny import save_checkpoint, tokenizer

from . import axolotl_stand_in


MODULES = ["trl_fused_grpo.integrations.axolotl", "trl_fused_grpo.integrations.axolotl_trainer"]
PLUGIN = f"{MODULES[0]}.FusedGRPOPlugin"
HAS_AXOLOTL = importlib.util.find_spec("axolotl") is not None


@pytest.fixture
def plugin(monkeypatch):
    """The plugin as axolotl registers it, before axolotl makes its configuration classes."""
    if HAS_AXOLOTL:
        manager = importlib.import_module("axolotl.integrations.base").PluginManager.get_instance()
        if PLUGIN not in manager.plugins:
            manager.register(PLUGIN)
        yield manager.plugins[PLUGIN]
        return
    axolotl_stand_in.install(monkeypatch)
    yield named(PLUGIN)()
    for name in MODULES:
        sys.modules.pop(name, None)


def named(path):
    """What a dotted name stands for, as axolotl looks it up."""
    folder, _, name = path.rpartition(".")
    return getattr(importlib.import_module(folder), name)


def axolotl_config(plugin):
    if HAS_AXOLOTL:
        return named("axolotl.core.trainers.grpo.args.AxolotlGRPOConfig")
    return axolotl_stand_in.make_config(named(plugin.get_training_args_mixin()))


def test_register_names_the_trainer(plugin):
    cfg = {"rl": "grpo", "trl": None}
    plugin.register(cfg)
    assert issubclass(named(cfg["trainer_cls"]), FusedGRPOTrainer)


@pytest.mark.parametrize("cfg", [{"rl": "dpo"}, {}, {"rl": "grpo", "trainer_cls": "my.Trainer"}])
def test_other_trainers_stay(plugin, cfg):
    before = dict(cfg)
    plugin.register(cfg)
    assert cfg == before


@pytest.mark.parametrize(
    ("cfg", "named_in_message"),
    [
        ({"rl": "grpo", "trl": {"async_prefetch": True}}, "trl.async_prefetch"),
        ({"rl": "grpo", "trl": {"use_data_producer": True}}, "trl.use_data_producer"),
        ({"rl": "gdpo", "context_parallel_size": 2}, "context_parallel_size"),
    ],
)
def test_what_cannot_be_fused_is_refused(plugin, cfg, named_in_message):
    with pytest.raises(ValueError, match=named_in_message):
        plugin.register(cfg)


def test_the_yaml_file_takes_every_option(plugin):
    inputs = named(plugin.get_input_args())
    assert set(inputs.model_fields) == {option.name for option in fields(FusedOptions)}
    assert not inputs().model_dump(exclude_none=True)


def test_a_value_that_an_option_cannot_have_is_refused(plugin):
    with pytest.raises(ValueError, match='fused_layout must be "auto"'):
        named(plugin.get_input_args())(fused_layout="dense")


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        ({"rl": "grpo", "fused_layout": "aligned"}, {"use_liger_loss": True, "fused_layout": "aligned"}),
        ({"rl": "gdpo", "trl": {"use_liger_loss": False}}, {"use_liger_loss": False}),
        ({"rl": "dpo"}, None),
    ],
)
def test_arguments_of_the_training(plugin, cfg, expected):
    assert plugin.get_training_args(cfg) == expected


def test_defaults_of_trl_stay(plugin):
    """The class that axolotl builds from the mixin has TRL's defaults and the options', none of another config."""
    config = axolotl_config(plugin)
    defaults = {option.name: option.default for option in fields(FusedOptions)}
    built, stock = (cls(output_dir="out", use_cpu=True, bf16=False) for cls in (config, GRPOConfig))
    assert {name: getattr(built, name) for name in defaults} == defaults
    assert [built.epsilon, built.loss_type, built.beta] == [stock.epsilon, stock.loss_type, stock.beta]


def built_trainer(plugin, cfg, tmp_path):
    """The trainer that axolotl's builder makes: the model and the reward functions are not keywords."""
    plugin.register(cfg)
    trainer_cls = named(cfg["trainer_cls"])
    options = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "seed": 3, "learning_rate": 1e-3}
    options |= {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
    options |= {"logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    args = axolotl_config(plugin)(output_dir=str(tmp_path / "fused"), **options, **plugin.get_training_args(cfg))
    return trainer_cls(
        str(save_checkpoint("llama", tmp_path, torch.float32)),
        [reward_length],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6 w7", "w8 w9"] * 4}),
        processing_class=tokenizer(),
    )


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_training_logs_the_losses_of_stock(plugin, tmp_path):
    trainer = built_trainer(plugin, {"rl": "grpo", "trl": {}}, tmp_path)
    trainer.args.max_steps = 2
    fused = losses(trainer)
    stock = losses(make_trainer(tmp_path, cls=GRPOTrainer, max_steps=2))
    assert fused == pytest.approx(stock, rel=1e-5, abs=1e-7)
    assert "fused/rows_recomputed" in trainer.state.log_history[0]
    assert not {"axolotl", "fused-grpo"} - set(trainer._tag_names)


def test_options_of_the_yaml_file_reach_the_trainer(plugin, tmp_path):
    said = named(plugin.get_input_args())(fused_layout="aligned").model_dump(exclude_none=True)
    assert built_trainer(plugin, {"rl": "grpo", **said}, tmp_path).fused_layout() == "aligned"
