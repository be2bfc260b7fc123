"""Where in the user's code something was built."""

from __future__ import annotations

import os
import sys

from ddp_audit.records import Location

LIBRARIES = frozenset(
    (
        "torch", "torchdata", "lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers",
        "datasets", "deepspeed", "ddp_audit", "functools", "contextlib", "runpy", "importlib", "_frozen_importlib",
        "_frozen_importlib_external", "abc", "typing", "copy",
    )
)  # fmt: skip


def user_location(skip: int = 1) -> Location | None:
    """The innermost frame outside the libraries, or ``None``.

    Files below the working folder are relative to it; others are bare names (law 4).
    """
    frame = sys._getframe(skip)
    for _ in range(80):
        name = frame.f_globals.get("__name__", "")
        if str(name).partition(".")[0] not in LIBRARIES:
            return Location(file=short_name(frame.f_code.co_filename), line=frame.f_lineno)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def short_name(file: str) -> str:
    """A path relative to the working folder when it lies below it, else the bare name."""
    try:
        relative = os.path.relpath(file)
    except (ValueError, OSError):
        return os.path.basename(file)
    return os.path.basename(file) if relative.startswith("..") or os.path.isabs(relative) else relative
