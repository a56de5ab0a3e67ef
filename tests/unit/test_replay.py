"""A run of any layout is replayed on one process."""

from pathlib import Path

from megatron_rl.config_files import dump_config
from megatron_rl.replay import on_one_process
from tests.tiny import run_config


def test_every_option_of_the_layout_is_set_back(tmp_path: Path) -> None:
    layout = {
        **{f"{kind}_parallel_size": 2 for kind in ("tensor", "pipeline", "context")},
        "pipeline_chunks": 2,
        "sequence_parallel": True,
    }
    split = run_config(trainer={**layout, "lr": 0.125})
    (tmp_path / "config.yaml").write_text(dump_config(split))
    found = on_one_process(tmp_path)
    assert found.trainer == run_config(trainer={"lr": 0.125}).trainer
