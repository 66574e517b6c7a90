"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from lightserve.frontend.service import Service


def models_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    def model_object(name: str) -> dict[str, Any]:
        model = service.model
        return {
            "id": name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "lightserve",
            "root": model.names[0],
            "max_model_len": service.context_len,
        }

    @router.get("/v1/models")
    async def list_models() -> JSONResponse:
        """List the served model under each of its names."""
        data = [model_object(name) for name in service.model.names]
        return JSONResponse({"object": "list", "data": data})

    @router.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> JSONResponse:
        """Describe the served model."""
        service.check_model(model_id)
        return JSONResponse(model_object(model_id))

    return router
