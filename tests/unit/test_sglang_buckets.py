"""Buckets of weights as another process reads them."""

import base64
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_rl.rollout.sglang_buckets import Buckets

READER = """
import base64, io, pickle, sys, torch
import torch.multiprocessing.reductions

class Named(pickle.Unpickler):
    def find_class(self, module, name):
        print(module, name, file=sys.stderr)
        return super().find_class(module, name)

for line in sys.stdin:
    told = Named(io.BytesIO(base64.b64decode(line))).load()
    total = 0.0
    for one in told["metadata"]:
        tensor = told["flattened_tensor"][one.start_idx:one.end_idx].view(one.dtype).reshape(one.shape)
        print(one.name, one.numel, tuple(tensor.shape), tensor.dtype, tensor.double().sum().item(), flush=True)
    print("done", flush=True)
    del told, tensor
"""
"""Reads payloads as SGLang does, and tells which names they ask for."""

TAKEN = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch", "Tensor"),
    ("torch", "UntypedStorage"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
    ("torch", "Size"),
    ("torch", "uint8"),
    ("torch", "bfloat16"),
    ("torch", "float32"),
    ("types", "SimpleNamespace"),
    ("collections", "OrderedDict"),
}
"""Names that SGLang 0.5.23 takes from a payload, of those that could be in one of ours."""


def tensors() -> list[tuple[str, Tensor]]:
    return [
        ("a", torch.arange(6.0).reshape(2, 3)),
        ("b", torch.arange(5.0).bfloat16()),  # what follows doesn't begin at a multiple of four bytes
        ("c", torch.arange(20.0).reshape(4, 5).t()),  # not contiguous
        ("d", torch.full((40,), 0.5)),  # larger than a bucket
        ("e", torch.ones(1)),
    ]


def filled(buckets: Buckets) -> list[tuple[list[SimpleNamespace], bool]]:
    return [(list(held), last) for held, last in buckets.fill(tensors())]


def test_tensors_are_put_together_until_a_bucket_is_full() -> None:
    held = filled(Buckets(torch.device("cpu"), 112))
    assert [[one.name for one in names] for names, _ in held] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [last for _, last in held] == [False, False, False, True]
    assert [(one.start_idx, one.end_idx) for one in held[0][0]] == [(0, 24), (32, 42)]


def test_no_tensors_no_bucket() -> None:
    assert list(Buckets(torch.device("cpu")).fill([])) == []


@pytest.mark.parametrize("size", [112, 10_000])
def test_another_process_reads_them(size: int) -> None:
    buckets = Buckets(torch.device("cpu"), size)
    command = [sys.executable, "-W", "ignore", "-c", READER]
    read = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin
        assert reader.stdout
        for held, _ in buckets.fill(tensors()):
            print(buckets.payload(held), file=reader.stdin, flush=True)
            read += list(iter(reader.stdout.readline, "done\n"))
        reader.stdin.close()
        asked = {tuple(line.split()) for line in (reader.stderr or []) if len(line.split()) == 2}
    expected = [f"{n} {t.nbytes} {tuple(t.shape)} {t.dtype} {t.double().sum().item()}\n" for n, t in tensors()]
    assert read == expected
    assert asked <= TAKEN, asked - TAKEN


def test_a_payload_is_small() -> None:
    buckets = Buckets(torch.device("cpu"))
    held, _ = next(iter(buckets.fill([("w", torch.zeros(1000, 1000))])))
    assert len(base64.b64decode(buckets.payload(held))) < 2000
