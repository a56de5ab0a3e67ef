"""Responses as the trainer sees them, with tokens that are here."""

from megatron_rl.types import Graded, Response, TrainedResponse


def trained_response(
    *,
    prompt_ids: tuple[int, ...],
    response_ids: tuple[int, ...],
    rollout_logprobs: tuple[float, ...],
    advantage: float,
    weight: float,
    group: int,
    number: int,
) -> TrainedResponse:
    """One whose home is rank 0."""
    response = Response(
        ids=response_ids,
        logprobs=rollout_logprobs,
        finish_reason="stop",
        weight_versions=(0,) * len(response_ids),
    )
    return TrainedResponse(
        prompt_ids=prompt_ids,
        length=len(response_ids),
        home=0,
        response=response,
        advantage=advantage,
        weight=weight,
        group=group,
        number=number,
    )


def tokens_of(one: TrainedResponse | Graded) -> Response:
    """They must be here."""
    assert one.response is not None
    return one.response
