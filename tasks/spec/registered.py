"""Unions of configurations that a registry names, so that the union need not import what is registered."""

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
    """Validates any registered kind as a union told apart by a tag, built when first needed."""

    kinds: Callable[[], tuple[type[Config], ...]]
    """Imports and returns the registered kinds."""
    tag: str
    """The field that tells them apart."""
    spelled_out: Callable[[Any], Any] = lambda value: value
    """Rewrites what stands in a file into the form that a kind takes."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a validator that builds the union when it is called."""
        return core_schema.no_info_plain_validator_function(self._validated)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of the union."""
        return handler(_union(self.kinds(), self.tag).core_schema)

    def _validated(self, value: Any) -> Any:
        return _union(self.kinds(), self.tag).validate_python(self.spelled_out(value))


@cache
def _union(kinds: tuple[type[Config], ...], tag: str) -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[Union[kinds], Field(discriminator=tag)])  # noqa: UP007  built from a table
