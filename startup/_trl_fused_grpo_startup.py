"""
What the variable `TRL_FUSED_GRPO` starts: `trl_fused_grpo`, imported as soon as TRL's GRPO or RLOO trainer is loaded.

`trl_fused_grpo.pth` lies in site-packages, beside this module. Python reads it when it starts, and imports this module
where the variable is set, before any other. So nothing but what Python has loaded anyway is imported here. The package
patches TRL as the variable says, at the end of its own import.
"""

import os
import sys


_TRAINERS = {"trl.trainer.grpo_trainer": "GRPOTrainer", "trl.trainer.rloo_trainer": "RLOOTrainer"}


class _Finder:
    """Finds TRL's trainers as Python does, and has the package imported at the end of its import."""

    def find_spec(self, name, path=None, target=None):
        if name not in _TRAINERS:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _import_package(module)

        spec.loader.exec_module = exec_module  # of this loader alone
        return spec


def _import_package(module):
    """Import the package. Where that fails, TRL's trainers can be imported, but not be made: none would be fused."""
    try:
        import trl_fused_grpo  # noqa: F401
    except Exception as error:
        variable = f"TRL_FUSED_GRPO={os.environ.get('TRL_FUSED_GRPO')}"
        message = f"{variable} cannot be heeded: {error} (Without {variable} TRL trains with its own loss.)"
        cause = error

        def refuse(cls, *args, **kwargs):
            raise RuntimeError(message) from cause

        print(f"WARNING: {message}", file=sys.stderr)
        for loaded in (module, *map(sys.modules.get, _TRAINERS)):  # the package itself may have loaded the other one
            for trainer in _TRAINERS.values():
                cls = getattr(loaded, "__dict__", {}).get(trainer)
                if cls is not None and (loaded is module or cls.__new__ is object.__new__):  # not the package's
                    cls.__new__ = staticmethod(refuse)


sys.meta_path.insert(0, _Finder())
