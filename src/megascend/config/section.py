"""The base of all sections of settings, and the kinds of numbers in them."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from megascend.config.explain import explain
from megascend.errors import ConfigError

Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[int, Field(ge=1, le=366 * 24 * 3600)]
"""Of waiting: torch's clocks overflow far above a year."""
Seed = Annotated[int, Field(ge=0, lt=2**62)]
"""torch takes 63 bits, and Megatron adds some thousands for each rank."""


class _RaisesConfigError(type(BaseModel)):
    """Turns pydantic's error into ours where a user constructs a section; nested sections keep their key path."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise ConfigError(explain(error, cls.__name__, cast("type[BaseModel]", cls))) from None


class Section(BaseModel, metaclass=_RaisesConfigError):
    """Base of all settings: immutable, strict about names, and one error class for whatever is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_it_is_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic takes for something else: true for 1, nothing for the present directory."""
        wanted = str(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and "bool" not in wanted and ("int" in wanted or "float" in wanted):
            raise ValueError("a number is expected here, not true or false")
        if value == "" and "Path" in wanted:
            raise ValueError("a path is expected here, not an empty string")
        return value
