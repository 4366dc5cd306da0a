"""
A plugin of axolotl: `plugins: [trl_fused_grpo.integrations.axolotl.FusedGRPOPlugin]` in its YAML file gives `rl: grpo`
the fused loss, with the fused options beside axolotl's own.

Written against axolotl 0.19. It makes its configuration classes while plugins are registered, so its trainer is named
here and not imported.
"""

from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from typing import Any, get_type_hints

from axolotl.integrations.base import BasePlugin  # ty: ignore[import-not-found]
from pydantic import BaseModel, create_model, model_validator
from typing_extensions import Self

from trl_fused_grpo.config import FusedGRPOConfig, FusedOptions


TRAINER = "trl_fused_grpo.integrations.axolotl_trainer.FusedAxolotlGRPOTrainer"
# axolotl's names of what TRL's GRPOTrainer does; gdpo is grpo with rewards normalised one by one
_GRPO = ("grpo", "gdpo")
_OPTIONS = [option for option in fields(FusedGRPOConfig) if option.name in {one.name for one in fields(FusedOptions)}]


def _said(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The fused options that a configuration of axolotl's has."""
    values = {option.name: cfg.get(option.name) for option in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


class _Checked(BaseModel):
    @model_validator(mode="after")
    def check_fused_options(self) -> Self:
        FusedOptions(**_said(vars(self)))  # refuses what an option cannot be
        return self


_types: dict[str, Any] = get_type_hints(FusedGRPOConfig)
_inputs: Any = {option.name: (_types[option.name] | None, None) for option in _OPTIONS}
# Fields of axolotl's YAML file. An option that is not in it has its own default
FusedInputArgs = create_model("FusedInputArgs", __base__=_Checked, __module__=__name__, **_inputs)

# Fields that axolotl's classes for training arguments inherit, beside those of TRL's. It has no other base: of two
# configurations a class would inherit the defaults of the wrong one
FusedTrainingArgs = make_dataclass(
    "FusedTrainingArgs",
    [(option.name, option.type, field(default=option.default, metadata=option.metadata)) for option in _OPTIONS],
    namespace={"__module__": __name__},
)


class FusedGRPOPlugin(BasePlugin):
    """
    The fused loss in axolotl.

    It sets `trainer_cls`, unless the configuration names one, and `use_liger_loss` of TRL's arguments, unless it says
    `trl: {use_liger_loss: false}`. axolotl's own hook for a trainer's class, `get_trainer_cls`, does not serve here:
    the class that it returns gets neither model nor reward functions. Without `rl: grpo` or `rl: gdpo` it does nothing.

    Raises:
        `ValueError`: for asynchronous GRPO and for context parallelism, for which axolotl has trainers of its own; and
        when an option has a value that it cannot have.
    """

    def register(self, cfg: Any) -> None:
        if cfg.get("rl") not in _GRPO:
            return
        trl_section = cfg.get("trl") or {}
        for name in ("async_prefetch", "use_data_producer"):
            if trl_section.get(name):
                raise ValueError(
                    f"axolotl's asynchronous GRPO computes log-probabilities of its own, which cannot be fused: remove "
                    f"trl.{name}, or {type(self).__name__} from plugins."
                )
        if (cfg.get("context_parallel_size") or cfg.get("sequence_parallel_degree") or 1) > 1:
            raise ValueError(
                "axolotl's context parallelism has a trainer of its own, which replaces TRL's generation: "
                f"set context_parallel_size to 1, or remove {type(self).__name__} from plugins."
            )
        if not cfg.get("trainer_cls"):
            cfg["trainer_cls"] = TRAINER

    def get_input_args(self) -> str:
        return f"{__name__}.FusedInputArgs"

    def get_training_args_mixin(self) -> str:
        return f"{__name__}.FusedTrainingArgs"

    def get_training_args(self, cfg: Any) -> dict[str, Any] | None:
        if cfg.get("rl") not in _GRPO:
            return None
        is_on = (cfg.get("trl") or {}).get("use_liger_loss")
        return {"use_liger_loss": is_on is not False, **_said(cfg)}
