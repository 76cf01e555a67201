"""Options: what is accepted, how it is stored, and how a wrong one is named."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.config import PRESETS, EngineConfig, GenerationConfig
from headrace.runtime.errors import ConfigError, PackageError
from headrace.runtime.grammar.spec import Grammar

INF, NAN = math.inf, math.nan

# field, values that are refused
BAD_GENERATION: dict[str, list[Any]] = {
    "max_new_tokens": [0, -1, 1.0, "8", True, NAN],
    "min_new_tokens": [-1, None, 2.5, True],
    "temperature": [-1, -0.001, NAN, INF, -INF, "0.8", None, True, 1j],
    "top_k": [-1, 1.5, None, True, "40"],
    "top_p": [2, -0.1, 1.0001, NAN, INF, None, "1", False],
    "min_p": [1.5, -0.1, NAN, None],
    "typical_acceptance": [1.5, -0.1, NAN, None, True],
    "repetition_penalty": [0, -1, NAN, INF, None, True],
    "presence_penalty": [2.1, -2.1, NAN, INF],
    "frequency_penalty": [2.1, -2.1, NAN, -INF],
    "seed": [-1, 2**64, 1.0, "1", True],
    "stop": [None, 3, "", [""], ["a", ""], ["a", 1], b"a", {"a": 1}, [None]],
    "stop_token_ids": [None, 3, [-1], [1.0], "12", [True], {"a": 1}, [None]],
    "include_stop_str_in_output": [0, 1, None, "yes"],
    "logprobs": [-1, 21, 1.5, True, "3"],
    "logit_bias": [None, [1, 2], {-1: 0.0}, {"1": 0.0}, {1: NAN}, {1: INF}, {1: "x"}, {True: 1.0}],
    "ignore_eos": [0, None, "no"],
    "n": [0, -1, 129, 1.0, None, True],
    "priority": [-101, 101, 0.5, None, True],
    "grammar": ["[0-9]+", 3, {}, {"type": "object"}, {"kind": "regex"}, {"kind": "x", "text": "y"}],
}
BAD_ENGINE: dict[str, list[Any]] = {
    "max_sequences": [0, -1, 4097, None, 1.5, True],
    "max_waiting": [-1, None],
    "max_chunk_tokens": [0, None, "512", 1025],
    "inter_token_bound_ms": [0, -1, NAN, INF, None, True],
    "num_threads": [0, -2, 1.5, True],
    "kv_budget_bytes": [0, -1, 1e9],
    "prefix_cache_bytes": [-1, 1.5, True],
    "context_tokens": [0, 1, True],
    "max_draft_tokens": [-1, 16, 1.5, True],
    "draft_package": ["", 3],
    "draft_pool_tokens": [-1, 2**25, 1.5, None],
    "batch_entropy_cap_nats": [-0.1, NAN, INF, "1.2", True],
    "target": ["", 3],
    "form": ["", 3],
    "isolated": [None, 1, "yes"],
    "stages": [0, -1, 2.0, "2", None],
    "micro_batches": [0, 65, 2.0, None],
    "pipeline_depth": [0, 13, 1.5, "2", None],
}
GOOD_GENERATION: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 1, "min_new_tokens": 1},
    {"temperature": 0, "top_k": 40, "top_p": 0.0, "min_p": 1},
    {"seed": 2**64 - 1, "n": 128, "logprobs": 20},
    {"logprobs": 0, "logit_bias": {5: -INF, 6: 3}},
    {"grammar": Grammar.regex("[0-9]+")},
    {"grammar": Grammar.json_schema({"type": "object"}), "temperature": 0.5},
    {"stop": ["a", "b"], "stop_token_ids": [1, 2], "include_stop_str_in_output": True},
]


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(field, value) for field, values in table.items() for value in values]


@pytest.mark.parametrize(("field", "value"), pairs(BAD_GENERATION))
def test_a_bad_generation_option_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        GenerationConfig(**{field: value})
    assert caught.value.field.partition("[")[0] == field
    assert caught.value.expected
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize(("field", "value"), pairs(BAD_ENGINE))
def test_a_bad_engine_option_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})


def test_every_option_is_checked() -> None:
    assert {f.name for f in dataclasses.fields(GenerationConfig)} == BAD_GENERATION.keys()
    assert {f.name for f in dataclasses.fields(EngineConfig)} == BAD_ENGINE.keys()


def test_the_message_tells_value_and_range() -> None:
    with pytest.raises(ConfigError, match=r"top_p=2 is not valid: expected a number from 0 to 1"):
        GenerationConfig(top_p=2)
    with pytest.raises(ConfigError, match=r"n=0 is not valid: expected an integer from 1 to 128"):
        GenerationConfig(n=0)


def test_min_new_tokens_fits_max_new_tokens() -> None:
    with pytest.raises(ConfigError, match="min_new_tokens=9"):
        GenerationConfig(max_new_tokens=8, min_new_tokens=9)


@pytest.mark.parametrize("values", GOOD_GENERATION, ids=str)
def test_round_trips(values: dict[str, Any]) -> None:
    config = GenerationConfig(**values)
    assert GenerationConfig.from_dict(config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config) == config
    assert hash(dataclasses.replace(config)) == hash(config)


def test_values_are_normalized() -> None:
    config = GenerationConfig(
        temperature=1,
        top_k=np.int64(3),  # type: ignore[arg-type]
        top_p=np.float32(0.5),  # type: ignore[arg-type]
        stop="END",  # type: ignore[arg-type]
        stop_token_ids={7, 5},  # type: ignore[arg-type]
    )
    assert config.stop == ("END",)
    assert config.stop_token_ids == (5, 7)
    assert [type(v) for v in (config.temperature, config.top_k, config.top_p)] == [
        float,
        int,
        float,
    ]


def test_a_config_cannot_be_changed() -> None:
    bias = {1: 2.0}
    config = GenerationConfig(logit_bias=bias)
    bias[1] = 3.0
    assert config.logit_bias == {1: 2.0}
    with pytest.raises(TypeError):
        config.logit_bias[1] = 3.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("do_sample", "temperature"),
        ("max_tokens", "max_new_tokens"),
        ("max_length", "max_new_tokens"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("repeat_penalty", "repetition_penalty"),
        ("stop_strings", "stop"),
    ],
)
def test_an_unknown_key_is_named_with_the_intended_one(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=.*did you mean {meant}\b"):
        GenerationConfig.from_dict({key: 1})


def test_an_unknown_engine_key_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean num_threads"):
        EngineConfig.from_dict({"n_threads": 2})
    with pytest.raises(ConfigError, match="one of max_sequences, max_waiting"):
        EngineConfig.from_dict({"colour": 2})
    assert EngineConfig.from_dict({"num_threads": 2}).to_dict()["num_threads"] == 2


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": [0, 2], "transformers_version": "4"}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"top_p": 0.9}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 50}, {"temperature": 0.6, "top_k": 50}),
        ({"temperature": 0.6, "top_k": -1, "top_p": None}, {"temperature": 0.6}),
        ({"stop_strings": ["x"], "max_new_tokens": 5}, {"stop": ("x",), "max_new_tokens": 5}),
    ],
)
def test_the_models_defaults(defaults: dict[str, Any], expected: dict[str, Any]) -> None:
    assert GenerationConfig.from_defaults(defaults) == GenerationConfig(**expected)


@pytest.mark.parametrize("values", [None, [1], "temperature", 5])
def test_only_a_mapping_makes_a_config(values: Any) -> None:
    with pytest.raises(ConfigError, match="a mapping of options"):
        GenerationConfig.from_dict(values)


def test_overrides_win_over_defaults() -> None:
    config = GenerationConfig.from_defaults({"do_sample": True, "top_p": 0.5}, temperature=0.0)
    assert (config.temperature, config.top_p) == (0.0, 0.5)


def test_whose_fault_a_wrong_default_is() -> None:
    with pytest.raises(PackageError, match=r"generation_config\.json: top_p=7"):
        GenerationConfig.from_defaults({"top_p": 7})
    with pytest.raises(ConfigError, match="top_p=7"):
        GenerationConfig.from_defaults({"top_p": 0.7}, top_p=7)
    with pytest.raises(ConfigError, match="do_sample"):
        GenerationConfig.from_defaults({}, do_sample=True)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted([*BAD_GENERATION, "do_sample", ""])), anything))
def test_any_data_makes_a_config_or_a_config_error(values: dict[str, Any]) -> None:
    try:
        config = GenerationConfig.from_dict(values)
    except ConfigError as error:
        assert error.field.partition("[")[0] in values
    else:
        assert GenerationConfig.from_dict(config.to_dict()) == config
        floats = [v for v in config.to_dict().values() if isinstance(v, float)]
        assert all(map(math.isfinite, floats))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_options(name: str) -> None:
    config = EngineConfig.preset(name, context_tokens=100)
    assert config.context_tokens == 100
    assert config.to_dict() == EngineConfig(context_tokens=100).to_dict() | dict(PRESETS[name])
    (option, value), *_ = PRESETS[name].items()
    assert getattr(EngineConfig.preset(name, **{option: value + 1}), option) == value + 1


def test_presets_are_for_what_they_say() -> None:
    latency, throughput, small = (EngineConfig.preset(name) for name in PRESETS)
    assert latency.max_draft_tokens and latency.pipeline_depth > 1
    assert throughput.max_draft_tokens == 0
    assert small.max_sequences < EngineConfig().max_sequences < throughput.max_sequences
    with pytest.raises(ConfigError, match=r"preset='fast'.*latency, throughput, low-memory"):
        EngineConfig.preset("fast")
