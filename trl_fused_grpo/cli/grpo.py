"""`trl-fused-grpo grpo` is `trl grpo` with the fused trainer and its options."""

from pathlib import Path
from typing import Any

import yaml

from trl_fused_grpo.options import FusedOptions, read_option

from .words import refuse, unknown_name


def grpo(words: list[str]) -> None:
    """Run `trl grpo` with the fused trainer."""
    names = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    try:
        if "--config" in words[:-1]:
            options = read_options(Path(words[words.index("--config") + 1]))
            check_values(options)
            names += options
        check_values(_said(words))
    except ValueError as error:
        refuse("grpo", str(error))
    # A file that cannot be read is told before torch is loaded
    from trl_fused_grpo import FusedGRPOConfig
    from trl_fused_grpo._compat.trl_cli import launch_options, option_names, run_grpo_command

    known = option_names(FusedGRPOConfig) | launch_options() | {"config", "help"}
    for name in names:
        plain = name.replace("-", "_")
        if not any(one.startswith(plain.removeprefix("no_")) for one in known):  # argparse takes beginnings
            refuse("grpo", unknown_name(plain, known))
    run_grpo_command(words, FusedGRPOConfig, "trl_fused_grpo.cli.grpo_script")


def _said(words: list[str]) -> dict[str, str]:
    """The options on a command line that have a value there."""
    said = {}
    for word, behind in zip(words, [*words[1:], "--"], strict=True):
        name, is_joined, value = word.partition("=")
        if word.startswith("--") and (is_joined or not behind.startswith("--")):
            said[name.removeprefix("--").replace("-", "_")] = value if is_joined else behind
    return said


def check_values(options: dict[str, Any]) -> None:
    """Refuse a value that an option of ours cannot have. TRL's parser would not say which it can have."""
    for name in FusedOptions.__dataclass_fields__.keys() & options:
        read_option(name, str(options[name]))


def read_options(file: Path) -> dict[str, Any]:
    """The options in a YAML file."""
    try:
        options = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict):
        raise ValueError(f"{file} has no options: it is no YAML mapping.")
    return options
