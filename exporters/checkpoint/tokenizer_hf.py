"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from headrace.exporters.checkpoint.json_files import maybe_object, read_text
from headrace.exporters.checkpoint.tokenizers_errors import map_tokenizers_errors
from headrace.exporters.checkpoint.values import TokenizerSource
from headrace.runtime.errors import CheckpointError

_TOKENIZER_FILE = "tokenizer.json"
_TEMPLATE_FILE = "chat_template.jinja"
_PROBE = "a"


def tokenizer_from_folder(folder: Path, config: dict[str, object]) -> TokenizerSource:
    """Read tokenizer.json and what its neighbours say about it.

    Raises:
        CheckpointError: it is missing or damaged, or it wraps texts in more than a BOS token.
    """
    tokenizer = read_tokenizer(folder)
    settings = maybe_object(folder / "tokenizer_config.json")
    generation = maybe_object(folder / "generation_config.json")
    prefix = _added_prefix(tokenizer, folder)
    bos = prefix if prefix is not None else _token_id(tokenizer, settings.get("bos_token"))
    eos = [
        *_ids(generation.get("eos_token_id"), folder),
        *_ids(config.get("eos_token_id"), folder),
    ]
    if (named := _token_id(tokenizer, settings.get("eos_token"))) is not None:
        eos.append(named)
    return TokenizerSource(
        tokenizer_json=tokenizer.to_str(),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        add_bos=prefix is not None,
        chat_template=_chat_template(folder, settings),
        generation_config=generation,
    )


def read_tokenizer(folder: Path) -> Tokenizer:
    """A Tokenizer that neither pads nor truncates."""
    path = folder / _TOKENIZER_FILE
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no {_TOKENIZER_FILE}; add it (transformers writes it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    text = read_text(path)
    with map_tokenizers_errors(f"{path} is not a valid tokenizer"):
        tokenizer = Tokenizer.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _added_prefix(tokenizer: Tokenizer, folder: Path) -> int | None:
    """The token that the post-processor puts before a text, if it does."""
    with map_tokenizers_errors(f"{folder / _TOKENIZER_FILE} cannot encode {_PROBE!r}"):
        plain = tokenizer.encode(_PROBE, add_special_tokens=False).ids
        wrapped = tokenizer.encode(_PROBE).ids
    if wrapped == plain:
        return None
    if wrapped[1:] == plain:
        return int(wrapped[0])
    raise CheckpointError(
        f"{folder / _TOKENIZER_FILE} puts more than one token around a text, "
        "which is not how a text generator is prompted; it is not supported"
    )


def _token_id(tokenizer: Tokenizer, token: object) -> int | None:
    if isinstance(token, dict):  # a serialized AddedToken
        token = token.get("content")
    return tokenizer.token_to_id(token) if isinstance(token, str) else None


def _ids(value: object, folder: Path) -> list[int]:
    """An id, a list of them, or nothing."""
    found: list[int] = []
    for token_id in value if isinstance(value, list) else [] if value is None else [value]:
        if type(token_id) is not int or token_id < 0:
            raise CheckpointError(f"{folder}: eos_token_id={value!r} is not a token id")
        found.append(token_id)
    return found


def _chat_template(folder: Path, settings: dict[str, object]) -> str | None:
    """chat_template.jinja, or the template (or the one named "default") of the settings."""
    if (folder / _TEMPLATE_FILE).exists():
        return read_text(folder / _TEMPLATE_FILE)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None
