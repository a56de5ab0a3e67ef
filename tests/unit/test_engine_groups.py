"""Which ranks share an engine."""

import pytest

from megatron_rl.errors import UserError
from megatron_rl.rollout.groups import EngineGroup, check_engine_groups


def test_consecutive_ranks_share_an_engine_and_the_first_leads() -> None:
    groups = [EngineGroup(rank=rank, size=3, world=6) for rank in range(6)]
    assert [group.number for group in groups] == [0, 0, 0, 1, 1, 1]
    assert [group.leads for group in groups] == [True, False, False, True, False, False]
    assert {group.engines for group in groups} == {2}
    assert list(groups[4].ranks) == [3, 4, 5]
    assert groups[0].leader_of(1) == 3


@pytest.mark.parametrize(("size", "world", "per_node"), [(4, 6, 6), (4, 12, 6), (3, 8, 4)])
def test_an_engine_that_does_not_fit_a_node_is_refused(size: int, world: int, per_node: int) -> None:
    with pytest.raises(UserError, match=rf"engines of {size} ranks don't divide {world} processes, {per_node} on each"):
        check_engine_groups(size, world, per_node)


def test_engines_that_fill_the_nodes_are_accepted() -> None:
    check_engine_groups(4, 16, 8)
    check_engine_groups(1, 1, 1)
