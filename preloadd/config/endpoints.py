"""Addresses of other nodes, as files may list them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from preloadd.config.strict import Text, listed
from preloadd.domain.endpoint import Endpoint
from preloadd.errors import ConfigError

MAX_ENDPOINTS = 256


def _address(text: str) -> str:
    try:
        Endpoint.parse(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return text


def _once_each(texts: tuple[str, ...]) -> tuple[str, ...]:
    found: dict[Endpoint, str] = {}
    for text in texts:
        endpoint = Endpoint.parse(text)
        if endpoint in found:
            raise ValueError(f"{text!r} is {found[endpoint]!r} once more (leave one of them out)")
        found[endpoint] = text
    return texts


Endpoints = Annotated[
    tuple[Annotated[Text, AfterValidator(_address)], ...],
    Field(max_length=MAX_ENDPOINTS),
    BeforeValidator(listed),
    AfterValidator(_once_each),
]
"""Each once, as `host:port` or `http://host:port`."""
