"""What keeps a hook from ever hurting the job: its errors are swallowed, and after a few it is off.

Every hook has a name in ``HOOKS``. ``_DDP_AUDIT_BREAK=<name>`` makes that hook raise each time
(tests only); ``all`` breaks every one.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

HOOKS = (
    "worker",
    "dataloader",
    "stateful_dataloader",
    "accelerate",
    "sampler",
    "nodes",
    "digest",
    "forward",
    "compile",
    "backward",
    "optimizer",
    "parameters",
    "gradient",
    "gradient_fsdp",
    "group",
    "wrappers",
    "fsdp",
    "device",
    "journal",
    "channel",
    "record_samples",
)
BREAK = "_DDP_AUDIT_BREAK"
MAX_ERRORS = 3


class BrokenForTestError(RuntimeError):
    """Raised inside a hook named by ``_DDP_AUDIT_BREAK``."""


class _Local(threading.local):
    on = False


class Clock:
    """The probe's own time. Nested and concurrent hooks of one thread count once."""

    def __init__(self) -> None:
        self.spent_ns = 0
        self._local = _Local()

    @property
    def running(self) -> bool:
        """Whether this thread is inside a hook."""
        return self._local.on

    @running.setter
    def running(self, value: bool) -> None:
        self._local.on = value


CLOCK = Clock()
_TRACER: list[Any] = [None]


class Hook:
    """One hook's health.

    Args:
        name: one of ``HOOKS``.
    """

    silent = False  # for all hooks: this process is a loader worker, or the probe is off

    def __init__(self, name: str) -> None:
        if name not in HOOKS:
            raise ValueError(f"unknown hook {name}")
        self.name = name
        self.off = False
        self.reason: str | None = None
        self.num_errors = 0
        self.reported = 0
        self.broken = bool({name, "all"} & set(os.environ.get(BREAK, "").split(",")))

    def failed(self, error: BaseException) -> None:
        """Note an error by its class name; turn the hook off after a few."""
        self.num_errors += 1
        if self.reason is None:
            self.reason = f"{type(error).__name__} in {self.name}"
        if self.num_errors >= MAX_ERRORS:
            self.off = True
        try:
            on_change(self)
        except Exception:
            self.off = True  # what cannot even be noted must not be tried again

    def unavailable(self, what: str) -> None:
        """The target has not the shape this hook was written for."""
        import torch

        self.off = True
        self.reason = f"{what} not available in torch {torch.__version__}"
        on_change(self)

    def _raise_for_test(self, *args: Any, **kwargs: Any) -> Any:
        raise BrokenForTestError

    def protect(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """The function with its errors swallowed and its time counted; ``None`` on failure."""

        @unseen
        @functools.wraps(function)
        def safe(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if self.off or Hook.silent:
                return None
            if local.on:
                return inner(*args, **kwargs)
            local.on = True
            start = now()
            # Dynamo, once it is there, would compile the frames of a hook. Nothing but C is called here.
            tracer = _TRACER[0]
            tracing = tracer(None) if tracer is not None else None
            try:
                return called(*args, **kwargs)
            except Exception as error:
                self.failed(error)
                return None
            finally:
                if tracer is not None:
                    tracer(tracing)
                local.on = False
                CLOCK.spent_ns += now() - start

        # What is looked up at every call costs more than what it does: names of this scope are cheapest.
        local, now = CLOCK._local, time.perf_counter_ns
        called = self._raise_for_test if self.broken else function

        def inner(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return called(*args, **kwargs)
            except Exception as error:
                self.failed(error)
                return None

        return safe


def _eval_frame() -> Any:
    """Dynamo's C module, which is there without dynamo being imported; ``None`` in a torch without it."""
    return sys.modules.get("torch._C._dynamo.eval_frame")


def unseen(function: F) -> F:
    """Have dynamo leave this function's own frame alone, so that it compiles the frames it would without us."""
    code, frames = getattr(function, "__code__", None), _eval_frame()
    if code is None or frames is None:
        return function
    if hasattr(frames, "skip_code"):
        frames.skip_code(code)
    elif hasattr(frames, "set_code_exec_strategy"):  # since torch 2.7
        action = frames._FrameAction
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
    return function


def dynamo_imported() -> None:
    """From now on hooks hide their frames from dynamo."""
    _TRACER[0] = getattr(_eval_frame(), "set_eval_frame", None)


def _ignore(hook: Hook) -> None:
    """Before the state exists nobody listens."""


on_change: Callable[[Hook], None] = _ignore
_hooks: dict[str, Hook] = {}


def hook(name: str) -> Hook:
    """The one ``Hook`` of this name."""
    if name not in _hooks:
        _hooks[name] = Hook(name)
    return _hooks[name]


def all_hooks() -> list[Hook]:
    """Every hook that was asked for so far."""
    return list(_hooks.values())
