"""Where transformers' models find attention and mask functions: in tables, and in their own files."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple


class InTable(NamedTuple):
    """An entry of one of transformers' tables, which all instances of the table share."""

    table: Any
    name: str

    def read(self) -> Any:
        return self.table().get(self.name)

    def write(self, function: Callable) -> None:
        self.table.register(self.name, function)


class InFile(NamedTuple):
    """A function of a modeling file, which the file's layers look up when they are called."""

    file: ModuleType
    name: str

    def read(self) -> Any:
        return getattr(self.file, self.name)

    def write(self, function: Callable) -> None:
        setattr(self.file, self.name, function)
