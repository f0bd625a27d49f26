"""``/v1/completions`` and ``/v1/chat/completions``."""

from typing import Any

from fastapi import APIRouter, Request

from specexport_runtime.sampling import SamplingParams
from specexport_runtime.server.state import state_of

router = APIRouter()


@router.post("/v1/completions")
async def complete(request: Request) -> dict[str, Any]:
    """Complete a prompt."""
    state = state_of(request)
    assert state.engine is not None  # noqa: S101
    body = await request.json()
    result = await state.engine.generate(body["prompt"], SamplingParams(max_tokens=body.get("max_tokens", 16)))
    choice = {"index": 0, "text": result.text, "finish_reason": result.finish_reason, "logprobs": None}
    return {"object": "text_completion", "model": state.config.model_name, "choices": [choice]}
