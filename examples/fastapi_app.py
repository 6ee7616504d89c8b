"""A web app with a language model in its event loop, set up by AIOSCHED_MODEL and the like.

$ uvicorn examples.fastapi_app:app --timeout-graceful-shutdown 10
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from aiosched import AioschedError, Engine, EngineConfig, InvalidRequest, SamplingParams
from aiosched_adapters.asgi import abort_on_disconnect, stream_events


class Question(BaseModel):
    prompt: str
    max_tokens: int = 128
    temperature: float = 0.7

    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature)


def build_app(engine: Engine) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/stream")
    async def stream(question: Question, request: Request) -> StreamingResponse:
        answer = engine.generate(question.prompt, question.sampling())
        return StreamingResponse(stream_events(request, answer), media_type="text/event-stream")

    @app.post("/complete")
    async def complete(question: Question, request: Request) -> dict[str, str]:
        answer = engine.generate(question.prompt, question.sampling())
        completion = await abort_on_disconnect(request, answer)
        return {"text": completion.text, "finish_reason": completion.finish_reason}

    @app.get("/ping")
    async def ping() -> dict[str, str]:
        return {"status": engine.health().status}

    @app.exception_handler(AioschedError)
    async def refuse(request: Request, error: AioschedError) -> JSONResponse:
        status = 422 if isinstance(error, InvalidRequest) else 503
        return JSONResponse({"error": str(error)}, status)

    return app


app = build_app(Engine(config=EngineConfig.from_env()))
