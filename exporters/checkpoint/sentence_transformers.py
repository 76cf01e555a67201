"""What the files of sentence-transformers say about an encoder: pooling, length, normalization."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from headrace.exporters.checkpoint.json_files import maybe_object, read_text
from headrace.runtime.errors import CheckpointError

MODULES_FILE = "modules.json"
_POOLING_FILE = "config.json"
_LENGTH_FILE = "sentence_bert_config.json"
_PROMPTS_FILE = "config_sentence_transformers.json"
# Its names for what `encoder_manifest.POOLINGS` holds, in files before version 5.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_KNOWN = ("mean", "cls", "max")


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """How a checkpoint's token states become a vector, and how long a text may be.

    Attributes:
        pooling: "mean", "cls" or "max"; `stated`: the checkpoint has files that say so.
        normalize: divide the vector by its length.
        max_tokens: None where nothing is said.
    """

    pooling: str
    normalize: bool
    max_tokens: int | None
    stated: bool


def sentence_settings(folder: Path) -> SentenceSettings:
    """Read modules.json and what it points to; mean pooling without them.

    Raises:
        CheckpointError: a file is damaged, or asks for a step that is not built.
    """
    max_tokens = _max_tokens(folder)
    if not (folder / MODULES_FILE).exists():
        return SentenceSettings("mean", False, max_tokens, stated=False)
    _refuse_default_prompt(folder)
    pooling, normalize = None, False
    for kind, path in _modules(folder):
        if kind == "Transformer" and path in ("", "."):
            continue
        if kind == "Pooling" and pooling is None:
            pooling = _pooling(folder / path / _POOLING_FILE)
        elif kind == "Normalize" and pooling is not None:
            normalize = True
        else:
            raise CheckpointError(
                f"{folder / MODULES_FILE} has a module {kind!r} that is not supported here; known "
                "are a Transformer at the top of the folder, then Pooling, then Normalize"
            )
    if pooling is None:
        raise CheckpointError(f"{folder / MODULES_FILE} has no Pooling; it gives no text vectors")
    return SentenceSettings(pooling, normalize, max_tokens, stated=True)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Class name and folder of each module, in order."""
    path = folder / MODULES_FILE
    try:
        modules = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; download it again") from None
    found = []
    for module in modules if isinstance(modules, list) else [None]:
        kind, place = (
            (module.get("type"), module.get("path")) if isinstance(module, dict) else ("", "")
        )
        if not isinstance(kind, str) or not kind or not _is_inside(place):
            raise CheckpointError(f"{path} is not a list of modules; download it again")
        found.append((kind.rpartition(".")[2], str(place)))
    return found


def _is_inside(place: object) -> bool:
    return isinstance(place, str) and not set(place) & set("/\\:\0") and place != ".."


def _pooling(path: Path) -> str:
    settings = maybe_object(path)
    stated = settings.get("pooling_mode")
    modes = stated if isinstance(stated, list) else [stated]
    if stated is None:
        modes = [mode for flag, mode in _FLAGS.items() if settings.get(flag)] or ["mean"]
    if len(modes) != 1 or modes[0] not in _KNOWN:
        raise CheckpointError(
            f"{path}: pooling {' + '.join(map(str, modes))} is not supported; known are "
            f"{', '.join(_KNOWN)}"
        )
    return str(modes[0])


def _max_tokens(folder: Path) -> int | None:
    path = folder / _LENGTH_FILE
    settings = maybe_object(path)
    if settings.get("do_lower_case") is True:
        raise CheckpointError(
            f"{path}: do_lower_case is not supported; let tokenizer.json make texts lower case"
        )
    return _positive(settings.get("max_seq_length"), path, "max_seq_length")


def _positive(value: object, path: Path, key: str) -> int | None:
    if value is not None and (type(value) is not int or value < 3):
        raise CheckpointError(f"{path}: {key}={value!r} is not a number of tokens from 3 on")
    return value if isinstance(value, int) else None


def _refuse_default_prompt(folder: Path) -> None:
    path = folder / _PROMPTS_FILE
    name = maybe_object(path).get("default_prompt_name")
    if name is not None:
        raise CheckpointError(
            f"{path} puts the prompt {name!r} before every text, which is not supported; set "
            "default_prompt_name to null and put it before the texts yourself"
        )
