"""Tokens go from their homes to the ranks that train them, and to no other, in every layout."""

import pytest

from tests.distributed.conftest import Launch
from tests.distributed.worker import KINDS, LAYOUTS

each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@each_layout
def test_what_is_packed_and_written_is_the_same_from_wherever_the_tokens_come(launched: Launch, layout: str) -> None:
    for rank in launched(layout):
        for kind in KINDS:
            found = rank[kind]["delivery"]
            assert found["differing"] == 0
            of_trainer, of_megatron = found["data_parallel_rank"]
            assert of_trainer == of_megatron


@each_layout
def test_a_rank_gets_the_tokens_of_its_micro_batches_and_no_more(launched: Launch, layout: str) -> None:
    ranks = [rank["untied"]["delivery"] for rank in launched(layout)]
    for found in ranks:
        assert all(arrived == needed for arrived, needed in found["bytes"])
    data_parallel = len({found["data_parallel_rank"] for found in ranks})
    trained = [  # of the last, which scores all
        {number for found in ranks if found["data_parallel_rank"][0] == replica for number in found["numbers"][-1]}
        for replica in range(data_parallel)
    ]
    assert sum(map(len, trained)) == len(set.union(*trained)) == 14
