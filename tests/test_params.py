"""SamplingParams and StructuredOutput: every rule, all in one message, and the checks against a model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from deepinfer.errors import CheckpointError, RequestError, UnsupportedError
from deepinfer.params import SamplingParams, StructuredOutput

NAN, INF = float("nan"), float("inf")

BAD_FIELDS = [
    ("n", 0),
    ("n", 5000),
    ("n", 1.5),
    ("n", True),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", 10**400),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", NAN),
    ("top_k", -2),
    ("top_k", 2.0),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", NAN),
    ("seed", -1),
    ("seed", [1]),
    ("seq_seed", 2**64),
    ("stop", ""),
    ("stop", ["fine", ""]),
    ("stop", [3]),
    ("stop", 3),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", 1),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [1.5]),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("prompt_logprobs", True),
    ("logit_bias", {1: NAN}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", [1]),
    ("logit_bias", {1: 100.5}),
    ("ignore_eos", 1),
    ("detokenize", "yes"),
    ("skip_special_tokens", None),
    ("include_stop_str_in_output", 0),
    ("so_args", "json"),
    ("so_args", {}),
    ("so_args", {"jsonschema": "{}"}),
    ("so_args", {"regex": "a", "ebnf": "b"}),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS, ids=lambda value: str(value)[:30])
def test_a_bad_field_is_one_request_error_that_names_it(name, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)


def test_every_broken_rule_is_listed_in_one_message():
    bad = {
        "temperature": NAN,
        "max_tokens": 0,
        "stop": ["", "x"],
        "top_p": 2,
        "so_args": {"regex": ""},
        "n": 0,
    }
    bad["seed"] = 1
    with pytest.raises(RequestError) as error:
        SamplingParams(**bad, seq_seed=2, min_tokens=5)
    lines = str(error.value).splitlines()
    assert len(lines) == 1 + len(bad)
    assert all(any(name in line for line in lines[1:]) for name in bad)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"seed": 1, "seq_seed": 2}, ("1", "2", "one value")),
        ({"min_tokens": 20, "max_tokens": 10}, ("20", "10")),
        ({"n": 2, "temperature": 0}, ("2", "n=1")),
        ({"stop": "x", "detokenize": False}, ("detokenize", "stop_token_ids")),
    ],
)
def test_fields_that_contradict_each_other(fields, parts):
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields)
    assert all(part in str(error.value) for part in parts)


def test_defaults_are_the_familiar_ones():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (
        1,
        1.0,
        1.0,
        0,
        16,
    )
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert params.allowed_token_ids is params.logit_bias is params.so_args is params.seed is None
    assert not params.greedy


def test_values_are_stored_in_one_form():
    params = SamplingParams(
        temperature=0,
        stop="end",
        stop_token_ids=np.array([3, 4]),
        allowed_token_ids=[5],
        logit_bias={np.int64(7): 1},
        top_k=np.int32(4),
        bad_words=["a", "b"],
    )
    assert params.greedy and isinstance(params.temperature, float)
    assert params.stop == ("end",) and params.bad_words == ("a", "b")
    assert params.stop_token_ids == (3, 4) and params.allowed_token_ids == (5,)
    assert params.logit_bias == {7: 1.0} and type(next(iter(params.logit_bias))) is int
    assert type(params.top_k) is int


def test_null_means_unset_for_lists():
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, max_tokens=None)
    assert (params.stop, params.stop_token_ids, params.bad_words, params.max_tokens) == ((), (), (), None)


def test_tiny_temperatures_are_greedy_and_the_limit_is_not():
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_seed_and_seq_seed_are_one_value():
    for params in (SamplingParams(seed=7), SamplingParams(seq_seed=7), SamplingParams(seed=7, seq_seed=7)):
        assert params.seed == params.seq_seed == 7
    assert SamplingParams(seed=2**64 - 1).seq_seed == 2**64 - 1
    assert SamplingParams(seed=7).replace(seed=8).seq_seed == 8
    assert SamplingParams(seed=7).replace(seq_seed=None).seed is None
    assert SamplingParams(seed=7).replace(n=2).seed == 7


def test_params_are_frozen_and_compare_by_value():
    params = SamplingParams(stop=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    assert params == SamplingParams(stop="a")
    assert params.replace(stop="b") != params
    with pytest.raises(RequestError):
        params.replace(n=0)
    with pytest.raises(TypeError):
        SamplingParams(2)  # keywords only


def test_every_field_has_help():
    assert all(field.metadata.get("help") for field in dataclasses.fields(SamplingParams))


# ---- defaults of a checkpoint ----


def test_defaults_from_generation_config():
    params = SamplingParams.defaults_from(
        {
            "temperature": 0.6,
            "top_p": 0.95,
            "top_k": None,
            "max_new_tokens": 99,
            "do_sample": True,
            "bos_token_id": 0,
        }
    )
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.95, 0, 99)
    assert SamplingParams.defaults_from({}) == SamplingParams()
    assert SamplingParams.defaults_from({"do_sample": False, "temperature": 0.7}).greedy


def test_a_bad_generation_config_names_the_file():
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*top_p is 3"):
        SamplingParams.defaults_from({"top_p": 3})


# ---- against a model ----


def test_ids_must_be_in_the_vocabulary():
    params = SamplingParams(stop_token_ids=[512], allowed_token_ids=[1, 900], logit_bias={600: 1.0, 2: 1.0})
    params.validate_for(1000)
    with pytest.raises(RequestError) as error:
        params.validate_for(512)
    for part in ("stop_token_ids", "512", "allowed_token_ids", "900", "logit_bias", "600", "511"):
        assert part in str(error.value)


def test_many_bad_ids_are_abridged():
    with pytest.raises(RequestError, match="10, 11, 12, 13, 14 and 85 more"):
        SamplingParams(stop_token_ids=list(range(100))).validate_for(10)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_limited_by_the_engine_and_the_vocabulary(name):
    params = SamplingParams(**{name: 21})
    params.validate_for(1000, max_logprobs=21)
    for limits in ({"max_logprobs": 20}, {}):
        with pytest.raises(RequestError, match=f"{name} is 21"):
            params.validate_for(1000 if limits else 20, **limits)


def test_something_must_be_left_to_generate():
    params = SamplingParams(allowed_token_ids=[3, 4], bad_words=["x"])
    params.validate_for(10, forbidden_ids=[3], bad_word_ids=[[5], [4, 4]])
    with pytest.raises(RequestError, match="3, 4 are all forbidden"):
        params.validate_for(10, forbidden_ids=[3], bad_word_ids=[[4]])


def test_bad_words_need_a_tokenizer_that_knows_them():
    params = SamplingParams(bad_words=["x"])
    with pytest.raises(RequestError, match="tokenizer"):
        params.validate_for(10)
    with pytest.raises(RequestError, match="no token"):
        params.validate_for(10, bad_word_ids=[[]])


def test_bad_words_are_spelled_with_and_without_a_space():
    spelled = []

    def encode(text):
        spelled.append(text)
        return [ord(letter) for letter in text]

    ids = SamplingParams(bad_words=["ab", " ab", "c"]).bad_word_ids(encode)
    assert set(spelled) == {"ab", " ab", "c", " c"}
    assert ids == ((97, 98), (32, 97, 98), (99,), (32, 99))
    assert SamplingParams().bad_word_ids(encode) == ()


def test_structured_output_is_refused_not_ignored():
    with pytest.raises(UnsupportedError, match="so_args"):
        SamplingParams(so_args={"json_object": True}).validate_for(1000)


# ---- structured output ----


class Person:
    """Looks like a pydantic model class."""

    @classmethod
    def model_json_schema(cls):
        return {"type": "object", "title": "Person"}


@pytest.mark.parametrize(
    ("so_args", "kind", "value"),
    [
        ({"json_schema": '{"type": "object"}'}, "json_schema", {"type": "object"}),
        ({"json_schema": {}}, "json_schema", {}),
        ({"json_schema": Person}, "json_schema", {"type": "object", "title": "Person"}),
        ({"regex": "a+", "after_reasoning": True}, "regex", "a+"),
        ({"ebnf": "root ::= 'a'"}, "ebnf", "root ::= 'a'"),
        ({"json_object": True}, "json_object", True),
        ({"choice": ["yes", "no"]}, "choice", ("yes", "no")),
        ({"structural_tag": {"type": "structural_tag"}}, "structural_tag", {"type": "structural_tag"}),
    ],
)
def test_structured_output_kinds(so_args, kind, value):
    typed = SamplingParams(so_args=so_args).so_args
    assert typed == StructuredOutput(**so_args)
    assert typed.kind == kind and getattr(typed, kind) == value


@pytest.mark.parametrize(
    ("so_args", "part"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "json_object": True}, "regex, json_object"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[1]"}, "json_schema"),
        ({"json_schema": 3}, "json_schema"),
        ({"structural_tag": "none"}, "structural_tag"),
        ({"json_object": False}, "json_object"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", "a"]}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"ebnf": ""}, "ebnf"),
        ({"regex": "a", "after_reasoning": "yes"}, "after_reasoning"),
    ],
)
def test_bad_structured_output(so_args, part):
    with pytest.raises(RequestError, match=part):
        StructuredOutput(**so_args)
    with pytest.raises(RequestError, match=f"so_args.*{part}"):
        SamplingParams(so_args=so_args)
