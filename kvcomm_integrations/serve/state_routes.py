"""Saving, loading and clearing what a served engine has learned, over HTTP, for its operator.

Off unless the server's environment names a folder and a key. Clients name files in that folder, never paths.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kvcomm_integrations.engines.learned_state import clear_state, load_state, save_state
from kvcomm_integrations.errors import ConfigurationError, StateFileError
from kvcomm_integrations.serve.asgi import Receive, Scope, Send, read_body, route, send_error, send_json
from kvcomm_integrations.serve.operator_key import KEY_VARIABLE, SHORTEST_KEY, OperatorKey

STATE_PATH = "/kvcomm/state/"
"""Followed by ``save``, ``load`` or ``clear``."""
FOLDER_VARIABLE = "KVCOMM_STATE_DIR"
"""Environment variable that names the folder of state files; unset: there is no such route."""

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


@dataclass(frozen=True)
class StateRoutes:
    """The operator's routes.

    Args:
        folder: where files are; ``None``: the routes are off.
        operator: whose key a request must show.
    """

    folder: Path | None = None
    operator: OperatorKey = field(default_factory=OperatorKey)

    @classmethod
    def from_environment(cls) -> StateRoutes:
        """As ``KVCOMM_STATE_DIR`` and ``KVCOMM_ADMIN_KEY`` say.

        Raises:
            ConfigurationError: the folder does not exist, or the key is missing or short. Shows no key.
        """
        folder = os.environ.get(FOLDER_VARIABLE, "")
        if not folder:
            return cls()
        operator = OperatorKey.from_environment()
        if not Path(folder).is_dir():
            raise ConfigurationError(f"{FOLDER_VARIABLE}={folder!r} is not a folder; make it, or unset the variable")
        if not operator.key:
            raise ConfigurationError(
                f"{FOLDER_VARIABLE} is set, so {KEY_VARIABLE} must hold a key of at least {SHORTEST_KEY} characters"
            )
        return cls(Path(folder).absolute(), operator)

    def wants(self, scope: Scope) -> bool:
        """Whether a request is for these routes."""
        return self.folder is not None and scope["type"] == "http" and route(scope).startswith(STATE_PATH)

    async def answer(self, client: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out an order.

        Args:
            client: vLLM's engine client.
        """
        if not self.operator.shown(scope):
            await send_error(send, 401, "this needs the operator's key: Authorization: Bearer <key>")
            return
        action = route(scope).removeprefix(STATE_PATH)
        if scope["method"] != "POST" or action not in ("save", "load", "clear"):
            await send_error(send, 404, f"POST to {STATE_PATH}save, load or clear")
            return
        try:
            order = StateOrder.model_validate_json(await read_body(receive) or b"{}")
            summary = await self._carry_out(client, action, order)
        except ValidationError as error:
            await send_error(send, 400, f"the body is not valid: {error.errors(include_url=False)[0]['msg']}")
        except StateFileError as error:
            await send_error(send, 400, str(error))
        else:
            await send_json(send, 200, asdict(summary))

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
