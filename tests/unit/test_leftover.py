"""What a checkpoint holds of a step's left-over draws, on the same and on other engines."""

from pathlib import Path

import pytest

from megatron_rl.errors import UserError
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.ledger import TRAINING_STREAM, Carried, Completed, Draw
from megatron_rl.rollout.leftover import Leftover, read, to_json, write_tokens
from megatron_rl.types import FinishReason, Graded, Group, Prompt, Response

PROMPTS = {row: Prompt(index=row, text=f"{row}", ids=(row,), answer="") for row in (11, 12, 13, 14)}


def response(*ids: int, reason: FinishReason = "stop") -> Response:
    logprobs = tuple(-0.1 * token for token in ids)
    return Response(ids=ids, logprobs=logprobs, finish_reason=reason, weight_versions=(4,) * (len(ids) - 1) + (5,))


def decode(ids: object) -> str:
    return f"text {ids}"


def draw(position: int, row: int) -> Draw:
    return Draw(stream=TRAINING_STREAM, position=position, prompt=PROMPTS[row], step=3)


GRADED = (
    Graded.of(response(7, 8, 9), score=1.0, text=decode((7, 8, 9)), details={"level": 2}, home=0),
    Graded.of(response(5, reason="length"), score=float("nan"), text=decode((5,)), home=0),
)
DONE = Completed(number=1, engine=0, answers=((3, "stop", 1.0), (1, "length", float("nan"))), kept=True)
BEGUN = [None, response(3, 4, reason="abort"), response(6), None]
DRAWS = (
    Carried(draw=draw(20, 11), engine=1),
    Carried(draw=draw(21, 12), engine=0, done=DONE),
    Carried(draw=draw(22, 13), engine=0),
    Carried(draw=draw(23, 14)),
)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Of two leaders; a third rank has nothing."""
    group = Group(prompt=PROMPTS[12], responses=GRADED)
    write_tokens(tmp_path / "0", Leftover(draws=DRAWS, held={21: group}, begun={22: [response(1, reason="abort")]}))
    write_tokens(tmp_path / "1", Leftover(draws=DRAWS, held={}, begun={20: BEGUN}))
    write_tokens(tmp_path / "2", Leftover(draws=DRAWS, held={}, begun={}))
    return sorted(tmp_path.iterdir())


@pytest.mark.parametrize("engines", [1, 2, 3, 5])
def test_every_engine_reads_its_part_and_all_know_the_draws(files: list[Path], engines: int) -> None:
    assert [file.name for file in files] == ["0", "1"]
    known = to_json(Leftover(draws=DRAWS, held={}, begun={}))
    parts = [
        read(files, known, PROMPTS, EngineGroup(rank=rank, size=1, world=engines), decode, responses=4)
        for rank in range(engines)
    ]
    for part in parts:
        assert [one.draw for one in part.draws] == [one.draw for one in DRAWS]
        assert [one.engine for one in part.draws] == [number % engines for number in range(4)]
        assert part.draws[1].done is not None
        assert part.draws[1].done.engine == 1 % engines
        assert str(part.draws[1].done.answers) == str(DONE.answers)  # NaN equals NaN there
    assert [{*part.held} for part in parts] == [{21} if rank == 1 % engines else set() for rank in range(engines)]
    group = parts[1 % engines].held[21]
    assert group.prompt == PROMPTS[12]
    for ours, theirs in zip(group.responses, GRADED, strict=True):
        assert (ours.response, ours.text, ours.details) == (theirs.response, theirs.text, theirs.details)
        assert (ours.home, str(ours.score)) == (1 % engines, str(theirs.score))
    begun = {position: answers for part in parts for position, answers in part.begun.items()}
    assert begun == {20: BEGUN, 22: [response(1, reason="abort"), None, None, None]}
    assert 20 in parts[0].begun


def test_a_rank_that_leads_no_engine_knows_the_draws_only(files: list[Path]) -> None:
    known = to_json(Leftover(draws=DRAWS, held={}, begun={}))
    part = read(files, known, PROMPTS, EngineGroup(rank=1, size=2, world=4), decode, responses=4)
    assert ({*part.held}, {*part.begun}, len(part.draws)) == (set(), set(), 4)


def test_a_damaged_or_missing_file_is_named(files: list[Path]) -> None:
    known = to_json(Leftover(draws=DRAWS, held={}, begun={}))
    alone = EngineGroup(rank=0, size=1, world=1)
    with pytest.raises(UserError, match=r"0 of 2 answers to row 12 .* a file of it is missing"):
        read(files[1:], known, PROMPTS, alone, decode, responses=4)
    files[0].write_bytes(files[0].read_bytes()[:-5])
    with pytest.raises(UserError, match=rf"^{files[0]}: .*move its checkpoint away"):
        read(files, known, PROMPTS, alone, decode, responses=4)
