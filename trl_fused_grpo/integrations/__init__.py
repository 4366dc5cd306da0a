"""
Frameworks that train with TRL. Nothing here is imported unless it is asked for, and no framework is a dependency.

- `axolotl.py`: a plugin of axolotl, which adds the options to its YAML file
- `axolotl_trainer.py`: the class for its `trainer_cls`
"""
