"""A text service with an API of its own: a bundle embedded in an asyncio program."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from specexport_runtime import AsyncSpecEngine, SamplingParams
from specexport_runtime.errors import EngineClosedError, InvalidRequestError, QueueFullError


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the bundle before the first request; finish the last ones before the program ends."""
    app.state.engine = await AsyncSpecEngine.load(os.environ["BUNDLE"], max_waiting=32)
    yield
    await app.state.engine.aclose(timeout=20)


app = FastAPI(lifespan=lifespan)


class Task(BaseModel):
    """What a client asks for."""

    prompt: str
    max_tokens: int = Field(64, ge=1, le=900)


@app.post("/continue")
async def continue_text(task: Task) -> StreamingResponse:
    """Stream the continuation of a text. A client that leaves frees its row before the next round."""
    try:
        request = await app.state.engine.submit(task.prompt, SamplingParams(max_tokens=task.max_tokens))
    except InvalidRequestError as error:
        raise HTTPException(400, str(error)) from error
    except (QueueFullError, EngineClosedError) as error:
        raise HTTPException(503, str(error), {"Retry-After": "1"}) from error
    return StreamingResponse((chunk.text async for chunk in request), media_type="text/plain")
