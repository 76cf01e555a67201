"""What a user may set. Frozen, keyword-only, checked when made; unknown keys are refused.

`EngineConfig` is about the engine and the machine, `GenerationConfig` about one request. Names
follow the field's habits (transformers, vLLM); `docs/architecture.md` lists where they differ.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from headrace.runtime.errors import ConfigError, PackageError
from headrace.runtime.grammar.spec import Grammar
from headrace.runtime.manifest import MAX_ROW_TOKENS
from headrace.runtime.option_checks import (
    flag,
    folder,
    integer,
    logit_bias,
    named,
    number,
    positive,
    stop_strings,
    token_ids,
)

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_DRAFT_TOKENS = 15
MAX_PRIORITY = 100

# What users of other runtimes write, and what to write here.
_FOREIGN_KEYS = {
    "do_sample": "temperature (0 is greedy)",
    "num_beams": "n (there is no beam search)",
    "num_return_sequences": "n",
    "best_of": "n",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens (the prompt is not counted)",
    "min_length": "min_new_tokens (the prompt is not counted)",
    "min_tokens": "min_new_tokens",
    "repeat_penalty": "repetition_penalty",
    "eos_token_id": "stop_token_ids",
    "stop_strings": "stop",
    "top_logprobs": "logprobs",
    "response_format": "grammar (Grammar.json_schema)",
    "guided_json": "grammar (Grammar.json_schema)",
    "guided_regex": "grammar (Grammar.regex)",
    "guided_grammar": "grammar (Grammar.lark)",
    "random_seed": "seed",
    "batch_size": "max_sequences",
    "max_num_seqs": "max_sequences",
    "max_batch_size": "max_sequences",
    "n_ctx": "context_tokens",
    "max_model_len": "context_tokens",
    "n_threads": "num_threads",
    "threads": "num_threads",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How one request is decoded. The plain default is greedy and runs to the end of the context.

    Attributes:
        max_new_tokens: tokens to generate at most; None fills the context.
        min_new_tokens: end-of-sequence and stop tokens are not drawn before this many.
        temperature: logits are divided by it; 0 takes the most probable token.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probabilities, after
            temperature and top_k, come to at least this, and never less than one; 1 keeps all.
        min_p: drop tokens less probable than this share of the most probable one; 0 keeps all.
        repetition_penalty: logits of tokens in the prompt or answer are divided by it where
            positive and multiplied where negative; 1 does nothing.
        presence_penalty: taken once from the logit of each token of the answer, -2 to 2.
        frequency_penalty: taken from it once an occurrence, -2 to 2.
        seed: of the noise, 0 to 2**64 - 1; None draws one from the system for each request.
        stop: strings that end the answer; a single string is accepted.
        stop_token_ids: tokens that end the answer, besides the model's own.
        include_stop_str_in_output: whether the matched stop string is part of the text.
        logprobs: report the log probability of each token and of this many alternatives; 0 for
            the token alone, None for nothing.
        logit_bias: added to the logits of these tokens; minus infinity bans one.
        ignore_eos: go on after the model's end-of-sequence tokens.
        n: how many answers to the same prompt.
        priority: higher ones are served first, -100 to 100.
        grammar: what the answer may be, as a whole. It ends when nothing can be added, in spite of
            `min_new_tokens`; one that is cut off (`max_new_tokens`, `stop`) is not whole.
        typical_acceptance: lossy, at temperatures above 0 only: take guessed tokens that are merely
            not improbable, whatever top_k, top_p and min_p say. The epsilon of Medusa's rule
            (`runtime/sampling/typical.py`), which is 0.09 there; more is stricter, 0 is off and
            exact. The text then depends on what was guessed, so that a seed does not repeat it.

    Raises:
        ConfigError: a value is wrong; names field, value and what is expected.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    ignore_eos: bool = False
    n: int = 1
    priority: int = 0
    grammar: Grammar | None = None
    typical_acceptance: float = 0.0

    _CHECKS: ClassVar[Mapping[str, Callable[[str, Any], Any]]]

    def __post_init__(self) -> None:
        _check_fields(self, self._CHECKS)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            limit = f"at most max_new_tokens, {self.max_new_tokens}"
            raise ConfigError("min_new_tokens", self.min_new_tokens, limit)
        if self.grammar is not None and self.ignore_eos:
            raise ConfigError(
                "ignore_eos", True, "False beside a grammar, which says where it ends"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationConfig:
        """Make one from plain data.

        Raises:
            ConfigError: a value is wrong or a key is unknown; names the likely intended key.
        """
        return _from_dict(cls, values)

    @classmethod
    def from_defaults(cls, defaults: Mapping[str, Any], **overrides: Any) -> GenerationConfig:
        """The model's `generation_config.json` under what the user set.

        Keys of the file that have no meaning here are passed over, as are nulls. `do_sample`
        decides: false is greedy whatever the temperature; true without a temperature is 1.0.

        Raises:
            PackageError: the file holds a value that is out of range.
            ConfigError: an override is wrong or unknown.
        """
        picked = _package_defaults(defaults)
        try:
            cls(**picked)
        except ConfigError as error:
            raise PackageError(f"generation_config.json: {error}") from None
        return cls.from_dict({**picked, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` takes."""
        return _to_dict(self)

    def __reduce__(self) -> tuple[Any, ...]:  # a mapping proxy cannot be pickled
        return GenerationConfig.from_dict, (self.to_dict(),)


# What an engine is for, as fields of `EngineConfig`.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # One or a few people wait: guess ahead, and make text while the model runs.
    "latency": {"max_draft_tokens": 8, "pipeline_depth": 2},
    # Many answers and nobody waits for the next word: rows go to sequences, none to guesses.
    "throughput": {"max_sequences": 64, "max_draft_tokens": 0, "inter_token_bound_ms": 1000.0},
    # Beside `runtime-export --preset low-memory`: few slots, nothing kept, small prompt chunks.
    "low-memory": {
        "max_sequences": 4,
        "max_chunk_tokens": 64,
        "prefix_cache_bytes": 0,
        "draft_pool_tokens": 4096,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine uses the machine. None leaves the choice to the engine.

    Attributes:
        max_sequences: sequences decoded at once; each has a KV slot.
        max_waiting: requests that may queue for a slot; more are refused.
        max_chunk_tokens: longest piece of a prompt in one step, when nobody else decodes.
        inter_token_bound_ms: time that a long prompt may add between two tokens of its
            neighbours; prompts are cut into shorter pieces to keep to it.
        max_draft_tokens: most tokens guessed ahead for a sequence in one step; 0 for none. None is
            8 on backends where drafts cannot change an answer, and 0 on others.
        batch_entropy_cap_nats: sequences whose running mean of entropy is above this get no
            drafts; None leaves it to what was accepted before.
        draft_pool_tokens: of all answers, the newest, that are kept to guess from where others go
            on alike; 0 keeps answers apart, so that the pace of one tells nothing of another.
        draft_package: folder of a smaller package with the same tokens, which guesses ahead too.
        num_threads: threads inside the model.
        kv_budget_bytes: memory for keys and values of all sequences.
        prefix_cache_bytes: how much of it may hold texts that have ended, for prompts that begin
            like them; None for all that nobody else needs, 0 for nothing.
        context_tokens: longest sequence, shorter than the model's own.
        target: which of the package's targets to load, e.g. "cpu_int8".
        form: which of the target's graphs to load, e.g. "ragged".
        pipeline_depth: steps that may be under way at once, 1 to 12. From 2 on the text of a step
            is made and delivered while the next one runs.
        stages: run the graph in so many parts, one after the other, as it was exported.
        micro_batches: with stages, split the rows of a step in up to so many parts that flow
            through them, each stage on its share of the threads; 1 gives one stage after the other
            all threads.
        isolated: run the model in a process of its own. If that crashes or is killed, it is started
            again and answers go on.

    Raises:
        ConfigError: a value is wrong; names field, value and what is expected.
    """

    max_sequences: int = 16
    max_waiting: int = 1024
    max_chunk_tokens: int = 256
    inter_token_bound_ms: float = 100.0
    max_draft_tokens: int | None = None
    batch_entropy_cap_nats: float | None = None
    draft_pool_tokens: int = 65536
    draft_package: str | None = None
    num_threads: int | None = None
    kv_budget_bytes: int | None = None
    prefix_cache_bytes: int | None = None
    context_tokens: int | None = None
    target: str | None = None
    form: str | None = None
    pipeline_depth: int = 1
    stages: int = 1
    micro_batches: int = 1
    isolated: bool = False

    _CHECKS: ClassVar[Mapping[str, Callable[[str, Any], Any]]]

    def __post_init__(self) -> None:
        _check_fields(self, self._CHECKS)
        if self.micro_batches > 1 and self.stages == 1:
            raise ConfigError("micro_batches", self.micro_batches, "1 without stages")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Make one from plain data.

        Raises:
            ConfigError: a value is wrong or a key is unknown; names the likely intended key.
        """
        return _from_dict(cls, values)

    @classmethod
    def preset(cls, name: str, **options: Any) -> EngineConfig:
        """A set of options by what it is for: "latency", "throughput" or "low-memory".

        Args:
            options: fields, over those of the preset.

        Raises:
            ConfigError: there is no such preset, or an option is wrong.
        """
        if name not in PRESETS:
            raise ConfigError("preset", name, f"one of {', '.join(PRESETS)}")
        return cls.from_dict({**PRESETS[name], **options})

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` takes."""
        return _to_dict(self)


def _package_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a transformers generation config that say something here."""
    known = {"max_new_tokens", "min_new_tokens", "repetition_penalty"}
    known |= {"temperature", "top_k", "top_p", "min_p"}
    picked = {key: defaults[key] for key in known if defaults.get(key) is not None}
    if picked.get("top_k") == -1:  # a common spelling of "off"
        picked["top_k"] = 0
    if (strings := defaults.get("stop_strings")) is not None:
        picked["stop"] = strings
    if (do_sample := defaults.get("do_sample")) is False:
        picked["temperature"] = 0.0
    elif do_sample is True:
        picked.setdefault("temperature", 1.0)
    return picked


Config = TypeVar("Config", GenerationConfig, EngineConfig)


def _from_dict(kind: type[Config], values: Mapping[str, Any]) -> Config:
    if not isinstance(values, Mapping):
        raise ConfigError(kind.__name__, values, "a mapping of options to values")
    names = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in names:
            raise ConfigError(str(key), values[key], _known_key(key, names))
    return kind(**values)


def _known_key(key: object, names: list[str]) -> str:
    """What to say about an unknown key: the likely intended one, or all of them."""
    foreign = _FOREIGN_KEYS.get(str(key))
    if foreign and foreign.split()[0] in names:
        return f"a known option; did you mean {foreign}?"
    if close := difflib.get_close_matches(str(key), names, n=1):
        return f"a known option; did you mean {close[0]}?"
    return f"a known option, one of {', '.join(names)}"


def _to_dict(config: GenerationConfig | EngineConfig) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for key, value in values.items():
        if isinstance(value, Mapping):
            values[key] = dict(value)
        elif isinstance(value, Grammar):
            values[key] = {"kind": value.kind, "text": value.text}
    return values


def _check_fields(config: object, checks: Mapping[str, Callable[[str, Any], Any]]) -> None:
    """Replace each field by its checked and normalized value."""
    for name, check in checks.items():
        object.__setattr__(config, name, check(name, getattr(config, name)))


def _grammar(name: str, value: Any) -> Grammar | None:
    if value is None or isinstance(value, Grammar):
        return value
    if isinstance(value, Mapping) and value.keys() == {"kind", "text"}:
        return Grammar(value["kind"], value["text"])
    expected = "a Grammar, such as Grammar.regex(...), or None"
    raise ConfigError(name, type(value).__name__, expected)


GenerationConfig._CHECKS = {
    "max_new_tokens": integer(1, optional=True),
    "min_new_tokens": integer(0),
    "temperature": number(0, math.inf),
    "top_k": integer(0),
    "top_p": number(0, 1),
    "min_p": number(0, 1),
    "repetition_penalty": positive,
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "seed": integer(0, 2**64 - 1, optional=True),
    "stop": stop_strings,
    "stop_token_ids": token_ids,
    "include_stop_str_in_output": flag,
    "logprobs": integer(0, MAX_LOGPROBS, optional=True),
    "logit_bias": logit_bias,
    "ignore_eos": flag,
    "n": integer(1, MAX_SAMPLES),
    "priority": integer(-MAX_PRIORITY, MAX_PRIORITY),
    "grammar": _grammar,
    "typical_acceptance": number(0, 1),
}
EngineConfig._CHECKS = {
    "max_sequences": integer(1, 4096),
    "max_waiting": integer(0),
    "max_chunk_tokens": integer(1, MAX_ROW_TOKENS),
    "inter_token_bound_ms": positive,
    "max_draft_tokens": integer(0, MAX_DRAFT_TOKENS, optional=True),
    "batch_entropy_cap_nats": number(0, math.inf, optional=True),
    "draft_pool_tokens": integer(0, 2**24),
    "draft_package": folder,
    "num_threads": integer(1, 1024, optional=True),
    "kv_budget_bytes": integer(1, optional=True),
    "prefix_cache_bytes": integer(0, optional=True),
    "context_tokens": integer(2, optional=True),
    "target": named,
    "form": named,
    "pipeline_depth": integer(1, 12),
    "stages": integer(1, 1024),
    "micro_batches": integer(1, 64),
    "isolated": flag,
}


ConfigT = TypeVar("ConfigT", GenerationConfig, EngineConfig)


def merge(config: ConfigT, overrides: Mapping[str, Any]) -> ConfigT:
    """`config` with some fields replaced; ConfigError for an unknown one."""
    if not overrides:
        return config
    return type(config).from_dict({**config.to_dict(), **overrides})
