"""Log-probs with the vocabulary split over two tensor-parallel ranks, against autograd through all logits at once."""

import itertools
import shutil
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_rl.training.logprobs import projected_logprobs
from tests.cases.softmax import Case, gradients, plain_scores

RANKS, COLUMNS = 2, 7


def test_ranks_that_hold_the_columns_of_half_the_vocabulary_agree_with_one_that_holds_all(tmp_path: Path) -> None:
    mp.spawn(compare, args=(tmp_path / "meeting",), nprocs=RANKS)


def compare(rank: int, meeting: Path) -> None:
    """In each process: an assertion that fails here fails the test."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    compilers = (False, True) if shutil.which("g++") else (False,)
    # The ban begins inside the second rank's columns, between the two, or the second rank has none to compute.
    for vocabulary, entropy_gradient, compiled in itertools.product((12, 7, 5), (False, True), compilers):
        compare_case(rank, vocabulary, entropy_gradient, compiled)
    dist.destroy_process_group()
    deadline = time.monotonic() + 10
    while found := gloo_threads():  # a thread that was joined is listed for a moment more
        assert time.monotonic() < deadline, found  # they would end the process with SIGABRT at times
        time.sleep(0.01)


def gloo_threads() -> list[str]:
    """Names of this process's threads that serve a process group."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            names.append(path.read_text().strip())
    return [name for name in names if "gloo" in name]


def compare_case(rank: int, vocabulary: int, entropy_gradient: bool, compiled: bool) -> None:
    """Scores, this rank's rows of the weight's gradient, and the sum over ranks of the hidden states'."""
    whole = Case.drawn(tokens=11, hidden=3, columns=RANKS * COLUMNS, vocabulary=vocabulary)
    with torch.no_grad():
        whole.weight[vocabulary:] = float("nan")
        whole.hidden[0] *= 1e4  # one token is certain; on the other rank's side for some columns
    mine = slice(rank * COLUMNS, (rank + 1) * COLUMNS)
    weight = whole.weight.detach()[mine].clone().requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    ours = projected_logprobs(
        whole.hidden,
        weight,
        whole.labels,
        chunk=4,
        group=group,
        entropy_gradient=entropy_gradient,
        compiled=compiled,
        **whole.options,
    )
    plain = plain_scores(whole)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    to_hidden, to_weight = gradients(
        (whole.hidden, weight), ours[0], ours[1] if entropy_gradient else None, whole.probe
    )
    dist.all_reduce(to_hidden)
    expected_hidden, expected_weight = gradients(
        (whole.hidden, whole.weight), plain[0], plain[1] if entropy_gradient else None, whole.probe
    )
    torch.testing.assert_close(to_hidden, expected_hidden, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(to_weight, expected_weight[mine], rtol=1e-12, atol=1e-12)
