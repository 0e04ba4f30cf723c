"""The live page of a served engine: its latest requests, of all clients. Off unless ``KVCOMM_LIVE=1`` is set."""

from __future__ import annotations

import os
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvcomm_integrations.chat.request_log import RequestLog, RunRecord
from kvcomm_integrations.report.live import PATH, asgi_app
from kvcomm_integrations.serve.asgi import refusal, route
from kvcomm_integrations.serve.names import LIVE_VARIABLE
from kvcomm_integrations.wire import Mode, RequestReport

PLAIN = "plain client"
"""Name for requests that say nothing of agents."""
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Headers that proxies add: such a request comes from another machine, though the connection comes from this one."""


class LiveRoute:
    """Records finished requests and shows them to this machine, if ``KVCOMM_LIVE`` says so."""

    def __init__(self) -> None:
        self.enabled = os.environ.get(LIVE_VARIABLE) == "1"
        self.log = RequestLog(keep_content=False)
        self._page = asgi_app(lambda: self.log)

    def wants(self, scope: Scope) -> bool:
        """The request is for the page, and there is one."""
        return self.enabled and route(scope) in (PATH, f"{PATH}/", f"{PATH}/panels", f"{PATH}/data")

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Show the page to this machine only, and not through a proxy."""
        headers = Headers(scope=scope)
        proxied = any(headers.get(name) for name in _FORWARDED)
        page: ASGIApp = refusal(403, "this page is for the server's own machine") if proxied else self._page
        await page({**scope, "path": route(scope)}, receive, send)


class RunTimer:
    """Times one request of a served engine."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log
        self._started = time.time()
        self._clock = time.perf_counter()
        self._first_ms: float | None = None

    def output(self, output: Any) -> None:
        """Note one of vLLM's outputs; the last one makes the record."""
        elapsed = (time.perf_counter() - self._clock) * 1e3
        if self._first_ms is None and any(part.token_ids for part in output.outputs):
            self._first_ms = elapsed
        if output.finished:
            self._log.add(self._record(output, elapsed))

    def _record(self, output: Any, total_ms: float) -> RunRecord:
        report = RequestReport.from_transfer_params(output.kv_transfer_params)
        prompt, cached = len(output.prompt_token_ids or ()), int(output.num_cached_tokens or 0)
        told = report or RequestReport(
            agent=PLAIN, mode=Mode.DENSE, prompt_tokens=prompt, exact=cached, computed=prompt - cached
        )
        times = output.metrics
        queued, scheduled = getattr(times, "queued_ts", 0.0), getattr(times, "scheduled_ts", 0.0)
        return RunRecord(
            number=self._log.number(),
            started=self._started,
            model=self._log.model,
            asked=Mode.AUTO,
            completion_tokens=getattr(times, "num_generation_tokens", 0),
            queue_ms=max(0.0, (scheduled - queued) * 1e3) if queued and scheduled else 0.0,
            ttft_ms=self._first_ms,
            total_ms=total_ms,
            finish_reason=str(output.outputs[0].finish_reason or "") if output.outputs else "",
            **told.model_dump(include=set(RequestReport.model_fields)),
        )
