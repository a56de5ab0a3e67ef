"""Metrics as (sum, weight): means of any split are the mean of the whole."""

import pytest

from megatron_rl.telemetry.metrics import MeanMetrics


def test_means_of_uneven_parts_are_weighted() -> None:
    metrics = MeanMetrics()
    metrics.add("length", 30.0, 3.0)
    metrics.add("length", 5.0)
    assert metrics.values() == {"length": 8.75}
    assert metrics.pairs == {"length": (35.0, 4.0)}


@pytest.mark.parametrize("plain", [True, False])
def test_merging_adds_sums_and_weights(plain: bool) -> None:
    one = MeanMetrics({"a": (1.0, 2.0), "b": (5.0, 1.0)})
    other = {"a": (4.0, 3.0), "c": (7.0, 2.0)}
    one.merge(other if plain else MeanMetrics(other))
    assert one.values() == {"a": 1.0, "b": 5.0, "c": 3.5}


def test_a_metric_of_nothing_has_no_value_and_still_counts_when_merged() -> None:
    metrics = MeanMetrics({"rare": (0.0, 0.0)})
    assert metrics.values() == {}
    metrics.merge({"rare": (3.0, 1.0)})
    assert metrics.values() == {"rare": 3.0}


def test_counts_of_things_that_are_true() -> None:
    metrics = MeanMetrics()
    for truth in (True, False, True, True):
        metrics.add("share", truth)
    assert metrics.values() == {"share": 0.75}


def test_the_pairs_it_was_made_of_are_not_changed() -> None:
    pairs = {"a": (1.0, 1.0)}
    MeanMetrics(pairs).add("a", 1.0)
    assert pairs == {"a": (1.0, 1.0)}
