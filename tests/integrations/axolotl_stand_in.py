"""
A stand-in for axolotl, which needs dozens of packages: the parts of its 0.19 that the plugin touches, under axolotl's
names, without any of its code. With axolotl installed the tests take the real one.
"""

import sys
from dataclasses import dataclass
from types import ModuleType

from trl import GRPOConfig, GRPOTrainer


class BasePlugin:
    def get_trainer_cls(self, cfg):
        return None


class AxolotlGRPOTrainer(GRPOTrainer):
    _tag_names = ("trl", "grpo", "axolotl")

    def __init__(self, *args, optimizer_cls_and_kwargs=None, **kwargs):
        super().__init__(*args, **kwargs)


@dataclass
class AxolotlTrainingMixins:
    model_type: str | None = None


def make_config(mixin):
    """`AxolotlGRPOConfig` as axolotl makes it once its plugins are registered."""

    class WithPlugins(AxolotlTrainingMixins, mixin):
        pass

    @dataclass
    class AxolotlGRPOConfig(WithPlugins, GRPOConfig):
        context_parallel_size: int | None = None

    return AxolotlGRPOConfig


def install(monkeypatch):
    """Let the modules stand in `sys.modules` for a test."""
    for name, members in {
        "axolotl": {},
        "axolotl.integrations": {},
        "axolotl.integrations.base": {"BasePlugin": BasePlugin},
        "axolotl.core": {},
        "axolotl.core.trainers": {},
        "axolotl.core.trainers.grpo": {},
        "axolotl.core.trainers.grpo.trainer": {"AxolotlGRPOTrainer": AxolotlGRPOTrainer},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
