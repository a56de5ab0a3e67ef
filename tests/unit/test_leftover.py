"""What a step leaves to the next, through the files of a checkpoint."""

from pathlib import Path

from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.ledger import Carried, Completed, Draw
from megatron_rl.rollout.leftover import Leftover, read, to_json, write_tokens
from megatron_rl.types import FinishReason, Graded, Group, Prompt, Response

PROMPTS = {row: Prompt(index=row, text="", ids=(1,), answer="") for row in (1, 2, 3)}
NAN = float("nan")


def response(*ids: int, reason: FinishReason = "abort") -> Response:
    return Response(ids=ids, logprobs=(-0.5,) * len(ids), finish_reason=reason, weight_versions=(4,) * len(ids))


def test_it_comes_back_on_another_layout(tmp_path: Path) -> None:
    """A group that is completed, one of which two of four answers are begun, and one of which there is nothing."""
    draws = [Draw(stream=0, position=n, prompt=PROMPTS[n + 1], step=5) for n in range(3)]
    done = Completed(number=0, engine=0, answers=((2, "stop", 1.0), (1, "length", NAN)), kept=True)
    answers = (response(5, 6, reason="stop"), response(7, reason="length"))
    group = Group(
        prompt=PROMPTS[1],
        responses=tuple(
            Graded.of(one, text=f"{one.ids}", score=score, details={"n": n}, home=0)
            for n, (one, score) in enumerate(zip(answers, (1.0, NAN), strict=True))
        ),
    )
    left = Leftover(
        draws=(Carried(draw=draws[0], engine=0, done=done), Carried(draw=draws[1], engine=0), Carried(draw=draws[2])),
        held={0: group},
        begun={1: [None, response(8, 9), response(4, reason="stop"), None]},
    )
    path = tmp_path / "leftover_00000.safetensors"
    write_tokens(path, left)
    first, second = (
        read([path], to_json(left), PROMPTS, EngineGroup(rank=rank, size=1, world=2), str, responses=4)
        for rank in (0, 1)
    )
    assert [one.draw for one in first.draws] == [one.draw for one in second.draws] == draws
    assert [one.engine for one in first.draws] == [0, 1, 0]
    (back,) = first.held.values()
    assert [(one.response, one.details) for one in back.responses] == [(answers[0], {"n": 0}), (answers[1], {"n": 1})]
    assert back.graded_scores == [1.0]
    assert first.begun == {}
    assert second.held == {}
    assert second.begun == {1: [None, response(8, 9), response(4, reason="stop"), None]}
