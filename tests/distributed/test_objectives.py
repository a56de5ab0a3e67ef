"""Every objective in every layout: against plain PyTorch on one process, and against the worked-out numbers."""

import pytest

from tests.distributed import objectives
from tests.distributed.conftest import Launch
from tests.distributed.data import VOCABULARY, make_groups
from tests.distributed.plain import Gradients, Plain, kl_of_responses
from tests.distributed.test_layouts import each_layout, whole_gap


@pytest.fixture(scope="session")
def plain(launched: Launch) -> dict[str, tuple[Gradients, float]]:
    """What one process without us comes to."""
    model = launched("single")[0]["models"]["untied"]
    return objectives.expected(Plain(model, vocabulary=VOCABULARY, temperature=0.8))


@each_layout
@pytest.mark.parametrize("case", objectives.cases())
def test_gradients_and_loss_equal_one_process(
    launched: Launch, plain: dict[str, tuple[Gradients, float]], layout: str, case: str
) -> None:
    single, loss_of_single = launched("single")[0]["untied"]["objectives"][case]
    for rank in launched(layout):
        gradients, loss = rank["untied"]["objectives"][case]
        assert loss == pytest.approx(loss_of_single, abs=1e-6)
        assert whole_gap(gradients, single) < objectives.cases()[case].bound
        if case in plain:
            expected, loss_of_plain = plain[case]
            assert loss == pytest.approx(loss_of_plain, abs=1e-6)
            assert whole_gap(gradients, expected) < max(4e-6, objectives.cases()[case].bound)  # float32 against float64


def test_on_policy_grpo_has_a_loss_of_zero_and_a_gradient(launched: Launch) -> None:
    gradients, loss = launched("single")[0]["untied"]["objectives"]["V2_grpo_eps0.2_on_policy"]
    assert loss == pytest.approx(0, abs=1e-7)
    assert all(tensor.norm() > 1e-4 for name, tensor in gradients.items() if not name.endswith("k_proj.bias"))


@each_layout
def test_the_divergence_of_each_response_is_that_of_one_process(launched: Launch, layout: str) -> None:
    model = launched("single")[0]["models"]["untied"]
    expected = kl_of_responses(Plain(model, vocabulary=VOCABULARY, temperature=0.8), make_groups())
    for rank in launched(layout):
        assert rank["untied"]["kl_of_responses"] == pytest.approx(expected, rel=1e-5)
