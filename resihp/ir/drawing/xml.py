"""XML elements as text: the little of it that a picture needs, with everything escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

__all__ = ["Attribute", "element", "number", "text_of"]

Attribute = str | float
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 has no way to write."""


def element(name: str, *children: str, **attributes: Attribute) -> str:
    """`<name …>children</name>`; an underscore in an attribute's name stands for a hyphen.

    Children are text that is XML already (`text_of`, `element`).
    """
    words = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(number(value))}"
        for key, value in attributes.items()
    )
    return f"<{name}{words}>{''.join(children)}</{name}>" if children else f"<{name}{words}/>"


def text_of(parts: str | Iterable[str]) -> str:
    """Text as the content of an element."""
    return escape(_FORBIDDEN.sub("�", parts if isinstance(parts, str) else "".join(parts)))


def number(value: Attribute) -> str:
    """A length with as many digits as a picture needs."""
    if isinstance(value, str):
        return _FORBIDDEN.sub("�", value)
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"
