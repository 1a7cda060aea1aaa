"""What a verifier wrote: a strict number, or no verdict; never a silent 0."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlcore_tbench2.rewards import RewardError, parse_json, parse_text


@pytest.mark.fault("DAT-05")
@pytest.mark.parametrize(
    ("data", "reward"),
    [
        (b"1\n", 1.0),
        (b"1.0", 1.0),
        (b" 0.5 ", 0.5),
        (b"1e0", 1.0),
        (b"0.0\r\n", 0.0),
        (b"-3", -3.0),
        (b"+.5", 0.5),
        (b"250", 250.0),
        (b"\xef\xbb\xbf1", 1.0),
    ],
)
def test_one_decimal_number_is_the_reward_and_is_not_clamped(data, reward):
    assert parse_text(data) == reward


@pytest.mark.fault("DAT-05")
@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b" \n",
            b"nan",
            b"inf",
            b"-inf",
            b"True",
            b"pass",
            b"1\n0\n",
            b"1 1",
            b"1_0",
            b"0x1",
            b"1,0",
            b"1e999",
            b".",
        ),
        *("١".encode(), "½".encode(), b"\xff\xfe1", b"1" * 1_000_000, b"\0", b"1\0"),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_anything_else_is_no_verdict(data):
    with pytest.raises(RewardError, match=r"reward\.txt"):
        parse_text(data)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_survives_being_written_and_read(number):
    assert parse_text(f"{number!r}\n".encode()) == number
    assert parse_json(json.dumps({"reward": number}).encode()) == {"reward": number}


@given(st.binary(max_size=30))
def test_any_bytes_are_a_finite_number_or_no_verdict(data):
    try:
        reward = parse_text(data)
    except RewardError:
        reward = 0.0
    assert math.isfinite(reward)


@pytest.mark.fault("DAT-05")
def test_an_object_of_numbers_gives_every_number():
    assert parse_json(b'{"reward": 0.5, "speed": 2}') == {"reward": 0.5, "speed": 2.0}
    assert parse_json(b"{}") == {}


@pytest.mark.fault("DAT-05")
@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"1", b"[1]", b'"1"', b"null", b'{"reward": null}', b'{"reward": true}', b'{"reward": "1"}'),
        *(b'{"reward": 1, "note": "text"}', b'{"reward": 1, "more": {}}', b'{"reward": NaN}', b'{"reward": Infinity}'),
        *(b'{"reward": 1', b'{"reward": 0, "reward": 1}', b"[" * 100_000, b'{"reward": 1' + b"0" * 5000 + b"}"),
    ],
    ids=lambda data: repr(data[:24]),
)
def test_one_wrong_value_makes_the_whole_object_no_verdict(data):
    with pytest.raises(RewardError, match=r"reward\.json"):
        parse_json(data)
