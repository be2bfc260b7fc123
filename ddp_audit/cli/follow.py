"""Reads the rare events of a journal while it grows, without loading numpy.

The supervisor looks at it four times a second beside the job, so it reads only what is new.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any

from ddp_audit.boot.folder import RUN_FILE, update_run

# As in ddp_audit.journal, which brings numpy with it; tests/cli/test_follow.py holds the two equal.
MAGIC = b"ddp-audit journal 1\n"
HEAD = struct.Struct("<IIB")
EVENT = 1
NAME = re.compile(r"rank(?P<rank>\d+)-r(?P<restart>\d+)-(?P<pid>\d+)-(?P<tag>[0-9a-f]+)\.journal$")

MAX_READ = 4 << 20  # bytes per call; a longer backlog is read at the next ones


class Follower:
    """One journal's main file, from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        match = NAME.match(path.name)
        self.rank = int(match["rank"]) if match else -1
        self.pid = int(match["pid"]) if match else -1
        self._offset = len(MAGIC)
        self._rest = b""

    def events(self) -> list[dict[str, Any]]:
        """Events written since the last call; none when the file cannot be read or is damaged."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                new = file.read(MAX_READ)
        except OSError:
            return []
        self._offset += len(new)
        data = self._rest + new
        found: list[dict[str, Any]] = []
        at = 0
        while at + HEAD.size <= len(data):
            length, crc, kind = HEAD.unpack_from(data, at)
            if at + HEAD.size + length > len(data):
                break
            payload = data[at + HEAD.size : at + HEAD.size + length]
            at += HEAD.size + length
            if kind == EVENT and zlib.crc32(payload, kind) == crc:
                try:
                    value = json.loads(payload)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    found.append(value)
        self._rest = data[at:] if len(data) - at <= 2 * MAX_READ else b""
        return found


class FolderFollower:
    """All journals of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journals: dict[str, Follower] = {}

    def look(self) -> list[Follower]:
        """Journals that appeared since the last call."""
        try:
            names = [name for name in os.listdir(self.folder) if name not in self.journals and NAME.match(name)]
        except OSError:
            return []
        new = [Follower(self.folder / name) for name in sorted(names)]
        self.journals.update({one.path.name: one for one in new})
        return new


def complete_mesh(out: Path, journals: FolderFollower) -> None:
    """Fill in the rest of ``--dp-size``, once a journal says how many ranks there are."""
    try:
        mesh = json.loads((out / RUN_FILE).read_text())["mesh"]
    except (OSError, ValueError, KeyError):
        return
    if len(mesh) != 2 or mesh[1] != ["mp", 0]:
        return
    dp_size = mesh[0][1]
    for path in sorted(journals.journals):
        start = next((e for e in Follower(journals.folder / path).events() if e.get("event") == "start"), {})
        world = start.get("world_size", 0)
        if world and world % dp_size == 0:
            update_run(out, mesh=[["dp", dp_size], ["mp", world // dp_size]])
            return
