"""Saving, loading and clearing what a served engine has learned, over HTTP, for its operator.

Off unless the server's environment names a folder and a key. Clients name files in that folder, never paths.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

from kvcomm_integrations.engines.learned_state import clear_state, load_state, save_state
from kvcomm_integrations.errors import ConfigurationError, StateFileError
from kvcomm_integrations.serve.asgi import read_body, route
from kvcomm_integrations.serve.names import FOLDER_VARIABLE, KEY_VARIABLE, STATE_PATH
from kvcomm_integrations.serve.operator_key import SHORTEST_KEY, OperatorKey
from kvcomm_integrations.serve.tenants import RefusedError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class StateOrder(BaseModel):
    """Body of a request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    """File in the server's folder; not used by ``clear``."""
    tenant: str | None = None
    """Only this tenant's corrections; ``None``: every tenant's."""
    merge: bool = False
    """``load``: in addition to what is known."""


class StateRoutes:
    """The operator's routes, if ``KVCOMM_STATE_DIR`` names a folder.

    Args:
        operator: whose key a request must show.

    Raises:
        ConfigurationError: the folder does not exist, or there is no key. Shows no key.
    """

    def __init__(self, operator: OperatorKey) -> None:
        named = os.environ.get(FOLDER_VARIABLE, "")
        self.folder = Path(named).absolute() if named else None
        self.operator = operator
        if self.folder and not self.folder.is_dir():
            raise ConfigurationError(f"{FOLDER_VARIABLE}={named!r} is not a folder; make it, or unset the variable")
        if self.folder and not operator.key:
            needed = f"{KEY_VARIABLE} must hold a key of at least {SHORTEST_KEY} characters"
            raise ConfigurationError(f"{FOLDER_VARIABLE} is set, so {needed}")

    async def answer(self, request: Request) -> JSONResponse:
        """Carry out an order.

        Raises:
            RefusedError: it is refused.
        """
        if not self.operator.shown(request.headers):
            raise RefusedError(401, "this needs the operator's key: Authorization: Bearer <key>")
        action = route(request.scope).removeprefix(STATE_PATH)
        if request.method != "POST" or action not in ("save", "load", "clear"):
            raise RefusedError(404, f"POST to {STATE_PATH}save, load or clear")
        try:
            order = StateOrder.model_validate_json(await read_body(request) or b"{}")
            summary = await self._carry_out(request.app.state.engine_client, action, order)
        except ValidationError as error:
            message = f"the body is not valid: {error.errors(include_url=False)[0]['msg']}"
            raise RefusedError(400, message) from error
        except StateFileError as error:
            raise RefusedError(400, str(error)) from error
        return JSONResponse(asdict(summary))

    async def _carry_out(self, client: Any, action: str, order: StateOrder) -> Any:
        async def call(method: str, *args: Any) -> list[Any]:
            return list(await client.collective_rpc(method, args=args))

        if action == "clear":
            return await clear_state(call, order.tenant)
        assert self.folder is not None
        if not _NAME.fullmatch(order.name):
            raise StateFileError(f"{order.name!r} is not a name for a state file: letters, digits and _.- only")
        path = self.folder / order.name
        if action == "save":
            return await save_state(call, path, order.tenant)
        return await load_state(call, path, order.tenant, merge=order.merge)
