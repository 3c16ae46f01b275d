"""The names in a table of rows, as the legal values of a key.

Dispatchers, schedules, optimizers and rate schedules are rows of tables of the package. If a
program adds a row, its name becomes a legal value of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Generic, TypeVar

from pydantic_core import CoreSchema, PydanticKnownError, core_schema

Row = TypeVar("Row")


class Names(Collection[str], Generic[Row]):
    """The names of the rows in `table` that `where` accepts, in their order, then `others`. As the
    annotation of a pydantic field, `Annotated[str, Names(TABLE)]`, they are its legal values, with
    the error message of a Literal. The table is read at every use."""

    def __init__(
        self,
        table: Mapping[str, Row],
        *others: str,
        where: Callable[[Row], bool] = lambda row: True,
    ) -> None:
        self.table, self.others, self.where = table, others, where

    def __iter__(self) -> Iterator[str]:
        yield from (name for name, row in self.table.items() if self.where(row))
        yield from self.others

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        return name in self.others or (name in self.table and self.where(self.table[name]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        def checked(value: object) -> object:
            if value in self:
                return value
            *names, last = map(repr, self)
            expected = f"{', '.join(names)} or {last}" if names else last
            raise PydanticKnownError("literal_error", {"expected": expected})

        return core_schema.no_info_plain_validator_function(checked)
