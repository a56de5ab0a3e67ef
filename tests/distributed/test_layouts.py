"""Every layout against one process and against transformers, with real process groups."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints_tools.megatron_to_hf import megatron_to_hf
from checkpoints_tools.verify import differences
from megatron_rl.resharding.hf_files import carry
from tests.distributed.conftest import EACH_MODEL, Launch
from tests.distributed.data import VOCABULARY
from tests.distributed.plain import Plain
from tests.distributed.worker import KINDS, LAYOUTS, SEQUENCES

each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_model = pytest.mark.parametrize(("layout", "kind"), EACH_MODEL)


@each_model
def test_logits_equal_transformers(launched: Launch, layout: str, kind: str) -> None:
    gaps = [rank[kind]["logits_gap"] for rank in launched(layout)]
    on_last_stage = [gap for gap in gaps if gap is not None]
    assert on_last_stage
    assert max(on_last_stage) < 1e-5


@each_kind
@each_layout
def test_scores_equal_transformers_on_every_rank(launched: Launch, layout: str, kind: str) -> None:
    ranks = launched(layout)
    plain = Plain(ranks[0]["models"][kind], vocabulary=VOCABULARY, temperature=1.0)  # sampling is at 0.8
    for rank in ranks:
        assert len(rank[kind]["score"]) == len(SEQUENCES)
        assert rank[kind]["score"] == ranks[0][kind]["score"]
        for ids, found in zip(SEQUENCES, rank[kind]["score"], strict=True):
            expected = plain.logprobs(ids[:1], ids[1:]).tolist()
            assert found == pytest.approx(expected, abs=1e-5)


@each_model
def test_weights_go_to_megatron_and_back_bit_by_bit(launched: Launch, layout: str, kind: str) -> None:
    for rank in launched(layout):
        original = load_file(rank["models"][kind] / "model.safetensors")
        returned = rank[kind]["round_trip"]
        assert set(returned) == set(original)
        for name, tensor in original.items():
            assert torch.equal(returned[name], tensor), name


@each_model
def test_a_converted_directory_is_loaded_by_us_and_by_megatron_bit_by_bit(
    launched: Launch, layout: str, kind: str
) -> None:
    for rank in launched(layout):
        original = load_file(rank["models"][kind] / "model.safetensors")
        for loaded in rank[kind]["megatron"].values():
            assert loaded.keys() == original.keys()
            assert all(torch.equal(loaded[name], original[name]) for name in original)


@each_kind
@each_layout
def test_a_checkpoint_of_a_layout_becomes_a_hugging_face_directory(
    launched: Launch, layout: str, kind: str, tmp_path: Path
) -> None:
    ranks = launched(layout)
    newest = max((ranks[0]["models"][kind].parent / layout / kind / "checkpoints").glob("step_*"))
    megatron_to_hf(newest, tmp_path / "hf")
    exported = load_file(tmp_path / "hf/model.safetensors")
    for rank in ranks:
        trained = rank[kind]["checkpointed"]
        assert trained.keys() == exported.keys()
        assert all(torch.equal(trained[name], exported[name]) for name in trained)
    assert list(differences(newest, tmp_path / "hf")) == []


@each_kind
@pytest.mark.parametrize("layout", ["tp2_pp2", "pp2_cp2"])
def test_what_megatron_writes_itself_with_uneven_stages_goes_home_bit_by_bit(
    launched: Launch, layout: str, kind: str, tmp_path: Path
) -> None:
    base = launched(layout)[0]["models"][kind]
    written = base.parent / layout / kind / "uneven"
    carry(base, written, torch.float32)
    megatron_to_hf(written, tmp_path / "hf")
    original, exported = (load_file(path / "model.safetensors") for path in (base, tmp_path / "hf"))
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)


@each_model
def test_each_rank_reads_only_its_slices(launched: Launch, layout: str, kind: str) -> None:
    for rank in launched(layout):
        padding = rank[kind]["held"] - rank[kind]["read"]
        assert 0 <= padding <= 2 * 40  # at most a row of the embedding and one of the output layer


@each_model
def test_gradients_equal_one_process(launched: Launch, layout: str, kind: str) -> None:
    for policy, of_tensor in (("on_policy", 3e-6), ("clipped", 1e-5)):  # exp(log-prob differences) adds rounding
        reference, _ = launched("single")[0][kind][policy]
        for rank in launched(layout):
            gradients, _ = rank[kind][policy]
            assert relative_gap(gradients, reference) < of_tensor
            assert whole_gap(gradients, reference) < 2e-6
            assert all(tensor.abs().max() > 0 for name, tensor in gradients.items() if not name.endswith("k_proj.bias"))


@each_kind
@each_layout
def test_a_gradient_computed_again_is_the_same(launched: Launch, layout: str, kind: str) -> None:
    assert [rank[kind]["repeated"] for rank in launched(layout)] == [0] * LAYOUTS[layout][0]


@each_model
def test_metrics_equal_one_process_on_every_rank(launched: Launch, layout: str, kind: str) -> None:
    for policy in ("on_policy", "clipped"):
        _, reference = launched("single")[0][kind][policy]
        for rank in launched(layout):
            _, metrics = rank[kind][policy]
            assert metrics == pytest.approx(reference, rel=1e-5, abs=1e-6)
            assert (0.05 < metrics["loss/clip_fraction"] < 0.95) == (policy == "clipped")


@each_model
def test_after_every_update_the_engine_equals_the_trainer(launched: Launch, layout: str, kind: str) -> None:
    ranks = launched(layout)
    for version, rounds in enumerate(zip(*(rank[kind]["engine"] for rank in ranks), strict=True)):
        gaps = [round_["logprob_gap"] for round_ in rounds if round_["logprob_gap"] is not None]
        assert gaps
        assert max(gaps) < 1e-5
        assert all(round_["greedy"] for round_ in rounds)
        assert all(round_["version"] == {version} for round_ in rounds)
        assert all(round_["grad_norm"] > 1e-3 for round_ in rounds)  # so the next round has other weights


@each_model
def test_the_norm_that_gradients_are_clipped_by_equals_one_process(launched: Launch, layout: str, kind: str) -> None:
    def norms(rank: dict[str, Any]) -> list[float]:
        return [round_["grad_norm"] for round_ in rank[kind]["engine"]]

    reference = norms(launched("single")[0])
    for rank in launched(layout):
        assert norms(rank)[0] == pytest.approx(reference[0], rel=1e-4)  # a mean over two optimizer steps
        assert norms(rank) == pytest.approx(reference, rel=2e-2)  # later weights agree as Adam lets them


@each_kind
@each_layout
@pytest.mark.parametrize("sharded", [False, True])
def test_a_resumed_trainer_goes_on_as_one_that_only_slept(
    launched: Launch, layout: str, kind: str, sharded: bool
) -> None:
    for rank in launched(layout):
        assert rank[kind]["resume"][sharded] == {"loaded": 0.0, "continued": 0.0, "asleep": 0.0}


@each_kind
@each_layout
def test_optimizer_state_on_the_host_changes_nothing(launched: Launch, layout: str, kind: str) -> None:
    for rank in launched(layout):
        found = rank[kind]["on_host"]
        assert found == {"loaded": 0.0, "continued": 0.0, "asleep": 0.0, "device": 0.0}


@each_kind
@each_layout
def test_another_layout_goes_on_from_a_checkpoint_of_one_process(launched: Launch, layout: str, kind: str) -> None:
    single = launched("single")[0][kind]["from_single"]
    saved, continued = ({name: single[which][name] for name in single[which]} for which in ("loaded", "continued"))
    for rank in launched(layout):
        found = rank[kind]["from_single"]
        for name, tensor in saved.items():
            assert torch.equal(found["loaded"][name], tensor), name
            if name.endswith("k_proj.bias"):
                continue  # its gradient is nothing but rounding, of which Adam takes the sign
            step, expected = found["continued"][name] - tensor, continued[name] - tensor
            assert (step - expected).norm() < 1e-2 * expected.norm(), name  # wrong moments miss by a third or more


def relative_gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference relative to the tensor's gradient; key biases have none to speak of, so to the whole one."""
    assert a.keys() == b.keys()
    whole = torch.cat([tensor.flatten() for tensor in b.values()]).norm()
    return max(
        float((a[name] - b[name]).norm() / (whole if name.endswith("k_proj.bias") else b[name].norm())) for name in b
    )


def whole_gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The difference of two gradients relative to their norm."""
    difference = torch.cat([(a[name] - b[name]).flatten() for name in b])
    return float(difference.norm() / torch.cat([tensor.flatten() for tensor in b.values()]).norm())
