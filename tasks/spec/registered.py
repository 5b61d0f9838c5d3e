"""Unions of the configuration classes in a registry, so that the union need not import them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Union

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from resources.config import Config


@dataclass(frozen=True)
class OneOfTheRegistered:
    """Validates any registered class as a tagged union, built on first use."""

    kinds: Callable[[], tuple[type[Config], ...]]
    """Imports and returns the registered classes."""
    tag: str
    """The discriminator field."""
    spelled_out: Callable[[Any], Any] = lambda value: value
    """Converts the value in a file to the form that the classes accept."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validated)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(_union(self.kinds(), self.tag).core_schema)

    def _validated(self, value: Any) -> Any:
        return _union(self.kinds(), self.tag).validate_python(self.spelled_out(value))


@cache
def _union(kinds: tuple[type[Config], ...], tag: str) -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[Union[kinds], Field(discriminator=tag)])  # noqa: UP007  built from a table
