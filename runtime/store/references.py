"""Addresses of models: what may be fetched, and what it is called."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from headrace.runtime.errors import StoreError

_HUB_VARIABLE = "HF_ENDPOINT"
_TOKEN_VARIABLE = "HF_TOKEN"
_HUB = "https://huggingface.co"
_EXPECTED = "hf://ORG/REPO/FILE.gguf, an https:// address or file:///PATH"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reference:
    """What to fetch.

    Attributes:
        text: as it was given, without what may be secret in it (a query, a password).
        url: to ask for.
        name: that the address suggests.
        token: to show to that host, and to none that it leads to.
    """

    text: str
    url: str
    name: str
    token: str | None = None


def parse_reference(text: str, *, has_sha256: bool) -> Reference:
    """Understand an address.

    Args:
        has_sha256: the content is known, so that a way on which it could be changed will do.

    Raises:
        StoreError: it is none, or an http:// one without a hash.
    """
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
    except ValueError as error:
        raise StoreError(f"{text!r} is not an address: {error}") from None
    if parts.scheme == "hf":
        return _hub_reference(text)
    if parts.scheme not in ("https", "http", "file") or not (host or parts.scheme == "file"):
        raise StoreError(f"{text!r} is not an address of a model; give {_EXPECTED}")
    if any(ord(letter) <= 32 or ord(letter) > 126 for letter in text):
        raise StoreError(f"{text!r} is not an address: spaces and the like are written as %20")
    if parts.scheme == "http" and host not in _LOOPBACK and not has_sha256:
        raise StoreError(
            f"{shown.geturl()} could be changed on its way; use https://, or give --sha256"
        )
    return Reference(shown.geturl(), text, _name_in(unquote(parts.path)))


def checked_sha256(text: str) -> str:
    """A hash in lower case.

    Raises:
        StoreError: it is none.
    """
    if not _SHA256.fullmatch(text.lower()):
        raise StoreError(f"{text!r} is not a SHA-256: it has 64 hexadecimal digits")
    return text.lower()


def published_sha256(header: str | None) -> str | None:
    """The hash in the Hugging Face Hub's `X-Linked-ETag`; None where that is something else."""
    value = (header or "").strip('"')
    return value if _SHA256.fullmatch(value) else None


def _hub_reference(text: str) -> Reference:
    """`hf://ORG/REPO[@REVISION]/PATH`; the environment names another hub, and a token."""
    org, _, rest = text.removeprefix("hf://").partition("/")
    repo, _, path = rest.partition("/")
    repo, _, revision = repo.partition("@")
    segments = [org, repo, *path.split("/")]
    if any(segment in ("", ".", "..") or "?" in segment or "#" in segment for segment in segments):
        raise StoreError(f"{text!r} is not an address of a model; give {_EXPECTED}")
    hub = os.environ.get(_HUB_VARIABLE, _HUB).rstrip("/")
    where = f"{quote(org)}/{quote(repo)}/resolve/{quote(revision or 'main', safe='')}/{quote(path)}"
    return Reference(text, f"{hub}/{where}", _name_in(path), os.environ.get(_TOKEN_VARIABLE))


def _name_in(path: str) -> str:
    return PurePosixPath(path).name.removesuffix(".gguf")
