"""The log of an engine's latest requests: who asked, how long each phase took, and what became of each prompt.

Bounded and in memory. Texts are recorded only where that has been switched on; everything else is counts and names.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvcomm_integrations.chat.chunks import FinalChunk
from kvcomm_integrations.engines.interface import Delta, GenerationRequest
from kvcomm_integrations.forks import watch
from kvcomm_integrations.wire import Mode, RequestReport, SegmentReport

RUNS_KEPT = 1000
"""Finished requests a log keeps."""
CONTENT_VARIABLE = "KVCOMM_RECORD_CONTENT"
"""Environment variable that, set to 1, makes logs keep texts too."""
PHASES = ("queue", "plan", "load", "repair", "compute", "decode")
"""What a request spends its time on, in order."""


class RunRecord(RequestReport):
    """One request: a flat row, so that JSON lines of it can be read as a table. Times are milliseconds.

    To its report this adds who answered whom, how long each phase took, and what came of it.
    """

    number: int = 0
    """Position in the log, from 1."""
    started: float = 0.0
    """When the request was handed to the engine, seconds since 1970."""
    model: str = ""
    tenant: str = "default"
    asked: Mode = Mode.AUTO
    """The mode the request asked for; ``mode`` is ``auto`` if something was loaded."""
    completion_tokens: int = 0
    prepare_ms: float = 0.0
    """Finding shared contents and building the prompt, before the engine had the request."""
    queue_ms: float = 0.0
    """Waiting in vLLM's queue, planning included."""
    ttft_ms: float | None = None
    """From hand-over to the first token; ``None`` if there was none."""
    total_ms: float = 0.0
    """From hand-over to the end."""
    finish_reason: str = ""
    """``stop``, ``length``, ``tool_calls``, ``abort``, ``error``, or empty while the request runs."""
    error: str = ""
    """Kind of the error that ended the request, without its message; empty if none did."""
    texts: tuple[str, ...] | None = None
    """Text of each segment; ``None`` unless recording texts is switched on."""
    answer: str | None = None
    """Text of the answer; ``None`` unless recording texts is switched on."""

    @property
    def phases(self) -> dict[str, float]:
        """Milliseconds of each of ``PHASES``, none negative; the first five add up to ``ttft_ms``."""
        first = self.total_ms if self.ttft_ms is None else self.ttft_ms
        plan = min(self.plan_ms, self.queue_ms) if self.queue_ms else self.plan_ms
        before = (max(0.0, self.queue_ms - plan), plan, self.load_ms, self.repair_ms)
        spent = (*before, max(0.0, first - sum(before)), max(0.0, self.total_ms - first))
        return dict(zip(PHASES, spent, strict=True))


class Recording:
    """One request while it runs.

    Args:
        log: where it ends up.
        number: its position there.
        request: the request.
        prepare_ms: what building it took.
    """

    def __init__(self, log: RequestLog, number: int, request: GenerationRequest, prepare_ms: float) -> None:
        self._log = log
        self.number = number
        self._request = request
        self._prepare_ms = prepare_ms
        self._started = time.time()
        self._clock = time.perf_counter()
        self._first_ms: float | None = None
        self._last: Delta | None = None
        self._answer: list[str] = []
        self._tokens = 0

    def delta(self, delta: Delta) -> None:
        """Note a chunk of the answer."""
        if self._first_ms is None and delta.token_ids:
            self._first_ms = self._elapsed_ms()
        self._tokens += len(delta.token_ids)
        if self._log.keep_content:
            self._answer.append(delta.text)
        if delta.finish_reason is not None:
            self._last = delta

    def done(self, chunk: FinalChunk) -> None:
        """The answer is complete."""
        self._log.add(self.record(chunk.finish_reason), self)

    def failed(self, error: BaseException) -> None:
        """The request ended without a complete answer: an error, or nobody wanted the rest."""
        aborted = isinstance(error, GeneratorExit) or type(error).__name__ == "CancelledError"
        self._log.add(self.record("abort" if aborted else "error", "" if aborted else type(error).__name__), self)

    def record(self, finish_reason: str = "", error: str = "") -> RunRecord:
        """The row as it stands."""
        params, last = self._request.params, self._last or Delta()
        prompt = len(self._request.prompt.token_ids)
        report = last.report or RequestReport(
            mode=params.mode, prompt_tokens=prompt, exact=last.cached_tokens, computed=prompt - last.cached_tokens
        )
        ours: dict[str, Any] = {
            "number": self.number,
            "started": self._started,
            "model": self._log.model,
            "agent": params.agent,
            "session": params.session,
            "tenant": params.tenant,
            "asked": params.mode,
            "prompt_tokens": prompt,
            "completion_tokens": last.completion_tokens or self._tokens,
            "prepare_ms": self._prepare_ms,
            "queue_ms": last.queue_ms or 0.0,
            "ttft_ms": last.ttft_ms if last.ttft_ms is not None else self._first_ms,
            "total_ms": self._elapsed_ms(),
            "finish_reason": finish_reason,
            "error": error,
            "texts": self._log.texts(self._request, report.segments),
            "answer": "".join(self._answer) if self._log.keep_content else None,
        }
        return RunRecord(**{**dict(report), **ours})

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._clock) * 1e3


class RequestLog:
    """The latest requests of one engine. Safe to use from any thread.

    Args:
        model: name of the engine's model.
        limit: finished requests to keep; the oldest go first.
        decode: reads token ids; needed only to keep texts.
        keep_content: keep the texts of prompts and answers too; ``None``: as ``KVCOMM_RECORD_CONTENT`` says.
    """

    def __init__(
        self,
        model: str = "",
        *,
        limit: int = RUNS_KEPT,
        decode: Callable[[Sequence[int]], str] | None = None,
        keep_content: bool | None = None,
    ) -> None:
        self.model = model
        self.keep_content = os.environ.get(CONTENT_VARIABLE) == "1" if keep_content is None else keep_content
        self._decode = decode
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._done: deque[RunRecord] = deque(maxlen=limit)
        self._running: dict[int, Recording] = {}
        watch(self)

    def after_fork(self) -> None:
        """In a forked child: an empty log, because the rows so far are in the parent's."""
        self._lock = threading.Lock()
        self._done.clear()
        self._running.clear()

    def begin(self, request: GenerationRequest, *, prepare_ms: float = 0.0) -> Recording:
        """Start to record a request; its ``done`` or ``failed`` must be called."""
        recording = Recording(self, self.number(), request, prepare_ms)
        with self._lock:
            self._running[id(recording)] = recording
        return recording

    def number(self) -> int:
        """The next request's position in the log."""
        with self._lock:
            return next(self._numbers)

    def add(self, record: RunRecord, recording: Recording | None = None) -> None:
        """Note a finished request."""
        with self._lock:
            if recording is not None and self._running.pop(id(recording), None) is None:
                return
            self._done.append(record)

    def records(self) -> list[RunRecord]:
        """Finished requests, the oldest first."""
        with self._lock:
            return list(self._done)

    def running(self) -> list[RunRecord]:
        """Requests that are being answered now, as far as they are known."""
        with self._lock:
            recordings = list(self._running.values())
        return [recording.record() for recording in recordings]

    def clear(self) -> None:
        """Forget what has finished."""
        with self._lock:
            self._done.clear()

    def texts(self, request: GenerationRequest, segments: Sequence[SegmentReport]) -> tuple[str, ...] | None:
        """Text of each segment, or ``None`` where texts are not kept."""
        if not self.keep_content or self._decode is None:
            return None
        ids = request.prompt.token_ids
        return tuple(self._decode(ids[s.start : s.end]) for s in segments)
