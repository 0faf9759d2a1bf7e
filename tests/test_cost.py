"""What a run costs: exact to the last digit, from the user's prices and no others."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.sim.cost import HOURS_PER_MONTH, Prices, cost_of, read_prices

# One hour of simulated time, 1.5 million tokens in, half a million out.
HOUR = {"duration": 3600.0, "total_input_tokens": 1_500_000, "total_output_tokens": 500_000}


def prices(tmp_path: Path, text: str, name: str = "prices.yaml") -> Prices:
    path = tmp_path / name
    path.write_text(text)
    return read_prices(path)


def test_two_gpus_for_an_hour(tmp_path: Path) -> None:
    cost = cost_of(prices(tmp_path, "currency: EUR\na100: 1.8\n"), "a100", 2, HOUR)
    assert cost.per_hour == Fraction(36, 10)  # 1.8 is eighteen tenths, not the float next to it
    assert cost.per_month == Fraction(36, 10) * 730
    assert cost.of_run == Fraction(36, 10)
    assert cost.per_million_output_tokens == Fraction(72, 10)
    assert cost.per_million_tokens == Fraction(18, 10)
    assert cost.as_dict()["cost_per_month"] == 2628.0


def test_storage_and_network_are_paid_by_the_month_and_spread_over_its_hours(
    tmp_path: Path,
) -> None:
    text = "currency: EUR\na100: 1\nstorage_per_month: 50\nnetwork_per_month: 23\n"
    cost = cost_of(prices(tmp_path, text), "a100", 1, HOUR)
    assert cost.per_month == 730 + 73
    assert cost.per_hour == Fraction(11, 10)


def test_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    from_json = prices(tmp_path, '{"currency": "EUR", "A100-80GB": 1.8}', "prices.json")
    from_yaml = prices(tmp_path, "currency: EUR\na100: 1.8\n")
    assert dict(from_json.per_gpu_hour) == dict(from_yaml.per_gpu_hour)


def test_no_tokens_no_price_of_a_token(tmp_path: Path) -> None:
    nothing = {"duration": 10.0, "total_input_tokens": 0, "total_output_tokens": 0}
    cost = cost_of(prices(tmp_path, "currency: EUR\na100: 1.8\n"), "a100", 1, nothing)
    assert cost.per_million_tokens is None and cost.as_dict()["cost_per_million_tokens"] is None


@given(
    cents=st.integers(0, 10**6),
    gpus=st.integers(1, 4096),
    duration_ns=st.integers(1, 10**15),
    tokens=st.integers(1, 10**12),
)
def test_the_parts_add_up_exactly(cents: int, gpus: int, duration_ns: int, tokens: int) -> None:
    table = Prices("EUR", {"A100-80GB": Fraction(cents, 100)})
    summary = {
        "duration": duration_ns / 1e9,
        "total_input_tokens": 0,
        "total_output_tokens": tokens,
    }
    cost = cost_of(table, "a100", gpus, summary)
    assert cost.per_hour == Fraction(cents * gpus, 100)
    assert cost.of_run * 3_600_000_000_000 == cost.per_hour * duration_ns
    assert cost.per_million_tokens * tokens == cost.of_run * 1_000_000
    assert cost.per_month == cost.per_hour * HOURS_PER_MONTH


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a100: 1.8\n", "currency"),
        ("currency: EUR\na100: -1\n", "negative"),
        ("currency: EUR\na100: .nan\n", "finite"),
        ("currency: EUR\na100: .inf\n", "finite"),
        ("currency: EUR\na100: cheap\n", "cheap"),
        ("currency: EUR\na100: true\n", "number"),
        ("currency: EUR\na100: 1\nA100-80GB: 2\n", "twice"),
        ("currency: EUR\na100: 1\na100: 2\n", "twice"),
        ("currency: EUR\n", "no GPU"),
        ("- 1\n- 2\n", "mapping"),
        ("currency: [EUR\n", "YAML"),
        ("", "mapping"),
        ("currency: EUR\na100: {b: 1}\n", "a100"),
        ("currency: EUR\na100: 1\nnetwork_per_gb: 1\n", "bytes_per_output_token"),
        ("currency: EUR\na100: 1\nstorage_gb: 1\n", "give both"),
        ("currency: EUR\na100: 1\nstorage_per_mont: 1\n", "storage_per_mont is not known"),
        ("currency: EUR\na100: 1\nsource: [a, b]\n", "source must be text"),
        ("currency: EUR\na100: !!python/object/apply:os.getcwd []\n", "YAML"),
        ("currency: EUR\n1: 2\n", "text"),
        ("[" * 1500, "cannot be read"),
    ],
)
def test_a_bad_price_file_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        prices(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_a_gpu_without_a_price_is_never_guessed(tmp_path: Path) -> None:
    table = prices(tmp_path, "currency: EUR\na100: 1.8\n")
    with pytest.raises(UserError, match="no price for H100"):
        cost_of(table, "h100", 1, HOUR)


def test_traffic_is_paid_by_the_gigabyte_of_the_tokens(tmp_path: Path) -> None:
    text = "currency: EUR\na100: 1\nnetwork_per_gb: 2\nbytes_per_output_token: 1000\n"
    cost = cost_of(prices(tmp_path, text), "a100", 1, HOUR)
    # Half a gigabyte in the hour.
    assert cost.of_run == 2 and cost.network_per_month == 730 and cost.per_hour == 2


def test_storage_is_paid_by_the_gigabyte(tmp_path: Path) -> None:
    text = (
        "currency: EUR\na100: 1\nstorage_gb: 100\nstorage_per_gb_month: 0.1\nother_per_month: 3\n"
    )
    cost = cost_of(prices(tmp_path, text), "a100", 1, HOUR)
    assert cost.storage_per_month == 10 and cost.per_month == 743
