"""The one place that knows the format of a journal file.

A journal is written by one process that proved to be a rank. Its main file holds frames, each a
9-byte head (payload length, CRC-32, type) and a payload: a fixed row of ``records.BATCH``,
``FORWARD`` or ``STEP``, or one JSON object for a rare event. Sample lists (8 bytes per value) go
to numbered list files beside it, so that old ones can be given up when the disk cap is reached.

Frames are appended by ``write(2)``: what was handed over survives the death of the process, and a
full disk is an error code and not the SIGBUS of a sparse map, so nothing need be reserved.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddp_audit.records import BATCH, FORWARD, STEP, ListKind

MAGIC = b"ddp-audit journal 1\n"
HEAD = struct.Struct("<IIB")
_pack_head, _crc32 = HEAD.pack, zlib.crc32  # some four frames per step of a training job
EVENT, BATCH_ROW, FORWARD_ROW, STEP_ROW, LIST_ROW = 1, 2, 3, 4, 5
LIST_HEAD = struct.Struct("<IB")
MAX_PAYLOAD = 1 << 28  # a longer claimed length is damage, not data

BATCH_STRUCT = struct.Struct("<IIIIIIHhQQ")
FORWARD_STRUCT = struct.Struct("<IIHHHIIQ")
STEP_STRUCT = struct.Struct("<IIHHHHHHdQQQdIIIII")
assert BATCH_STRUCT.size == BATCH.itemsize
assert FORWARD_STRUCT.size == FORWARD.itemsize
assert STEP_STRUCT.size == STEP.itemsize

NAME = re.compile(r"rank(?P<rank>\d+)-r(?P<restart>\d+)-(?P<pid>\d+)-(?P<tag>[0-9a-f]+)\.journal$")


def frame(kind: int, payload: bytes) -> bytes:
    """One frame: head and payload."""
    return _pack_head(len(payload), _crc32(payload, kind), kind) + payload


def file_name(rank: int, restart: int, pid: int, tag: str) -> str:
    """Name of a main file. ``tag`` is hex and tells apart equal pids on two hosts."""
    return f"rank{rank:05d}-r{restart}-{pid}-{tag}.journal"


class JournalWriter:
    """Appends frames to a journal. Not thread-safe: the caller holds a lock.

    Args:
        folder: the ``journal/`` folder; made when absent, mode 0700.
        name: from ``file_name``.
        cap_bytes: disk space for main and list files together (law 5). Above it the list files
            of all but the first and the two newest iterations are removed, and a single
            iteration that is too long stops keeping lists.

    Raises:
        OSError: the file could not be made or written (full disk, read-only folder). The caller
            turns the journal off then.
    """

    def __init__(self, folder: Path, name: str, cap_bytes: int = 256 << 20) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / name
        self.cap_bytes = cap_bytes
        self.capped = False
        self.bytes_written = 0
        self._main_bytes = 0
        self._fd: int = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._segments: dict[int, int] = {}  # segment -> bytes
        self._segment = 0
        self._list_fd = -1
        self._write(self._fd, MAGIC)

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.write(fd, view)
            view = view[done:]
        self.bytes_written += len(data)

    @property
    def lists_kept(self) -> bool:
        """False once the current segment alone has outgrown its share of the cap."""
        return self._segments.get(self._segment, 0) < self.cap_bytes // 4

    def rows(self, data: bytes) -> None:
        """Append ready frames to the main file. Beyond half the cap rows are dropped."""
        if self._main_bytes + len(data) > self.cap_bytes // 2:
            self.capped = True
            return
        self._main_bytes += len(data)
        self._write(self._fd, data)

    def event(self, event: str, fields: dict[str, Any]) -> None:
        """Append one rare event. Events are always written."""
        payload = json.dumps({"event": event, **fields}, separators=(",", ":")).encode()
        self._write(self._fd, frame(EVENT, payload))

    def next_segment(self) -> None:
        """Begin a new list file when the present one has grown: call at the start of an epoch.

        Keeps the first and the two newest segments once lists hold more than half of the cap.
        """
        if self._segments.get(self._segment, 0) < min(4 << 20, self.cap_bytes // 16):
            return
        if self._list_fd >= 0:
            os.close(self._list_fd)
            self._list_fd = -1
        self._segment += 1
        while sum(self._segments.values()) > self.cap_bytes // 4 and len(self._segments) > 2:
            oldest = sorted(self._segments)[1]
            self._segment_path(oldest).unlink(missing_ok=True)
            del self._segments[oldest]
            self.capped = True

    def _segment_path(self, segment: int) -> Path:
        return self.path.with_suffix(f".lists{segment:05d}")

    def lists(self, data: bytes) -> bool:
        """Append ready LIST frames. False when they were dropped for the cap."""
        if not self.lists_kept:
            self.capped = True
            return False
        if self._list_fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._list_fd = os.open(self._segment_path(self._segment), flags, 0o600)
        self._segments[self._segment] = self._segments.get(self._segment, 0) + len(data)
        self._write(self._list_fd, data)
        return True

    def close(self) -> None:
        """Close the files; nothing is written."""
        for fd in (self._fd, self._list_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._list_fd = -1


def list_frame(serial: int, kind: ListKind, values: bytes) -> bytes:
    """A LIST frame; ``values`` are little-endian 8-byte words."""
    return frame(LIST_ROW, LIST_HEAD.pack(serial, kind) + values)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalContent:
    """What could be read of one journal.

    Attributes:
        events: the JSON objects in order of writing.
        batches, forwards, steps: structured arrays in order of writing.
        list_keys: (serial, kind, length) per list; ``list_values`` are their words, one after another.
        cut: the file ends inside a frame, or a frame is damaged; what came before is here.
    """

    path: Path
    events: tuple[dict[str, Any], ...]
    batches: np.ndarray
    forwards: np.ndarray
    steps: np.ndarray
    list_keys: tuple[tuple[int, int, int], ...]
    list_values: np.ndarray
    cut: bool


def _frames(data: bytes, start: int) -> Iterator[tuple[int, bytes] | None]:
    """Yield (kind, payload); a last ``None`` when the data end inside a frame or are damaged."""
    at = start
    while at < len(data):
        if at + HEAD.size > len(data):
            yield None
            return
        length, crc, kind = HEAD.unpack_from(data, at)
        at += HEAD.size
        if length > MAX_PAYLOAD or at + length > len(data):
            yield None
            return
        payload = data[at : at + length]
        if zlib.crc32(payload, kind) != crc:
            yield None
            return
        at += length
        yield kind, payload


def read_journal(path: Path) -> JournalContent | None:
    """Read a main file and the list files beside it.

    Returns:
        ``None`` when the file is no journal (other magic). A cut or damaged file gives what came
        before the damage.

    Raises:
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        return None
    events: list[dict[str, Any]] = []
    parts: dict[int, list[bytes]] = {BATCH_ROW: [], FORWARD_ROW: [], STEP_ROW: []}
    sizes = {BATCH_ROW: BATCH.itemsize, FORWARD_ROW: FORWARD.itemsize, STEP_ROW: STEP.itemsize}
    cut = False
    for item in _frames(data, len(MAGIC)):
        if item is None:
            cut = True
            break
        kind, payload = item
        if kind == EVENT:
            value = json.loads(payload)
            if isinstance(value, dict):
                events.append(value)
        elif kind in parts and len(payload) == sizes[kind]:
            parts[kind].append(payload)
    keys: list[tuple[int, int, int]] = []
    values: list[bytes] = []
    for segment in sorted(path.parent.glob(path.stem + ".lists[0-9]*")):
        for item in _frames(segment.read_bytes(), 0):
            if item is None:
                break  # the last frame of a list file may be cut; its batch is then without a list
            kind, payload = item
            if kind == LIST_ROW and len(payload) >= LIST_HEAD.size and (len(payload) - LIST_HEAD.size) % 8 == 0:
                serial, list_kind = LIST_HEAD.unpack_from(payload)
                keys.append((serial, list_kind, (len(payload) - LIST_HEAD.size) // 8))
                values.append(payload[LIST_HEAD.size :])
    return JournalContent(
        path=path,
        events=tuple(events),
        batches=np.frombuffer(b"".join(parts[BATCH_ROW]), dtype=BATCH),
        forwards=np.frombuffer(b"".join(parts[FORWARD_ROW]), dtype=FORWARD),
        steps=np.frombuffer(b"".join(parts[STEP_ROW]), dtype=STEP),
        list_keys=tuple(keys),
        list_values=np.frombuffer(b"".join(values), dtype=np.uint64),
        cut=cut,
    )
