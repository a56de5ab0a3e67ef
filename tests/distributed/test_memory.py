"""The formula for every byte against what each rank holds, in every layout."""

import pytest

from tests.distributed.conftest import EACH_MODEL, Launch
from tests.distributed.worker import LAYOUTS

TOKENS = 64  # of the micro-batch


@pytest.mark.parametrize(("layout", "kind"), EACH_MODEL)
def test_every_byte_is_computed(launched: Launch, layout: str, kind: str) -> None:
    for rank in launched(layout):
        assert len(rank[kind]["memory"]) == 4  # fp32 and bf16, with and without the distributed optimizer
        for trainer, (measured, computed) in rank[kind]["memory"].items():
            of_loss = measured.pop("activations") - computed.pop("activations")
            assert measured == computed, trainer
            if "pipeline_chunks" not in LAYOUTS[layout][1]:  # whose two micro-batches are not there at the same time
                assert 0 <= of_loss <= 32 * TOKENS, trainer
