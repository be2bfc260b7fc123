"""What the ranks of a running job say to each other: where to write, how far they are, when to stop.

All of it goes through the job's own key-value store with a client of our own, polled and never
waited on; a store that is gone ends the conversation, never the job. Journals are the truth; the
channel only agrees on their folder, warns early, and agrees on the step after which to stop.

Two facts about ``TCPStore`` shape this file (torch 2.13). Sharing the job's client would let one
of our waits block the job's calls, hence the client of our own. A client whose server has gone
prints a C++ warning with a stack at its next call, hence the plain socket beside it, which
notices the end of the server silently.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddp_audit.collect import carry
from ddp_audit.settings import JOURNAL_FOLDER, Settings

MOVED_FILE = "moved.json"
"""In the folder of a node that is not the first: where its ranks' evidence went."""

WARNING_STEPS = 20  # the live warning rests on the first 20 common steps
POST_ALWAYS = 32  # digests are posted at every poll up to this step, then every POST_EVERY steps
POST_EVERY = 100
POLL_SECONDS = 0.5
CONNECT_SECONDS = 2.0
FOLDER_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is in the job."""

    rank: int
    world_size: int
    local_rank: int | None
    restart: int
    has_group: bool


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str | bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class StoreGoneError(Exception):
    """The store's server has ended."""


class StoreClient:
    """A client of our own to the job's store, with a watch on its server's life.

    Every method raises ``StoreGoneError`` once the server has ended, and never blocks on a missing key.
    """

    def __init__(self, store: Store, prefix: str, watch: socket.socket | None, raw: Any) -> None:
        self._store = store
        self._prefix = prefix
        self._watch = watch
        self.raw = raw  # the torch store itself, for a process group of our own

    def alive(self) -> bool:
        """Whether the server still holds its end of the connection."""
        if self._watch is None:
            return True
        try:
            return self._watch.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _guard(self) -> None:
        if not self.alive():
            raise StoreGoneError

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._guard()
        try:
            self._store.set(self._prefix + key, value)
        except Exception as error:
            raise StoreGoneError from error

    def peek(self, key: str) -> bytes | None:
        """The value of a key, or ``None`` when it is not there yet."""
        self._guard()
        try:
            if not self._store.check([self._prefix + key]):
                return None
            return bytes(self._store.get(self._prefix + key))
        except Exception as error:
            raise StoreGoneError from error

    def decide(self, key: str, mine: str) -> str:
        """First writer wins; every caller gets the winner's value."""
        self._guard()
        try:
            return bytes(self._store.compare_set(self._prefix + key, "", mine)).decode()
        except Exception as error:
            raise StoreGoneError from error

    def close(self) -> None:
        """Close the watch; the store client goes with its last reference."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _connect(identity: Identity) -> StoreClient | None:
    """A client to the launcher's store, else to the default group's; ``None`` when there is none."""
    dist = sys.modules.get("torch.distributed")
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if dist is None or c10d is None:
        return None
    prefix = f"_ddp_audit/{identity.restart}/"
    address: tuple[str, int] | None = None
    store: Any = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        with contextlib.suppress(KeyError, ValueError):
            address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if address is None:
        if not identity.has_group:
            return None
        base = c10d._get_default_store()
        while hasattr(base, "underlying_store"):
            base = base.underlying_store
        if isinstance(base, dist.TCPStore):
            address = (base.host, base.port)
        else:
            store = base.clone()  # FileStore, HashStore: no server that could go away
    watch: socket.socket | None = None
    if address is not None:
        watch = socket.create_connection(address, timeout=CONNECT_SECONDS)
        watch.setblocking(False)
        watch.set_inheritable(False)
        store = dist.TCPStore(
            *address,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=CONNECT_SECONDS),
        )
    return StoreClient(store, prefix, watch, store)


class Channel:
    """One rank's end of the conversation. Made by ``open_channel``.

    Attributes:
        folder: the journal folder to write into.
        run_id: the run id that all ranks agreed on.
        stop_at: counted steps after which to leave, or ``None``. Read by the training thread.
        data_ranks: global ranks that must read different samples; set by the hooks once a wrapper
            is known, ``None`` until then and where a model axis exists: no live warning then.
    """

    def __init__(self, settings: Settings, identity: Identity) -> None:
        self.settings = settings
        self.identity = identity
        self.folder = settings.journal_folder
        self.run_id = settings.run_id
        self.stop_at: int | None = settings.steps
        self.data_ranks: tuple[int, ...] | None = None
        self.carries = False  # rank 0 cannot read our folder: the journal travels through the store
        self.client: StoreClient | None = None
        self._contents: list[int] = []
        self._step = -1
        self._counted = 0
        self._proposed: int | None = None
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._started = time.monotonic()

    # ---- training thread

    def step_done(self, step: int, content: int, counted: int) -> None:
        """Note a finished round. ``content`` is a digest of what was read, 0 = not taken."""
        self._step = step
        self._counted = counted
        if len(self._contents) < POST_ALWAYS and step == len(self._contents):
            self._contents.append(content)

    def confirm_stop(self, counted: int) -> bool:
        """Whether to leave now. Every rank asks at the same counted step and gets the same answer."""
        if self.settings.steps is not None and counted >= self.settings.steps:
            return True
        if self._proposed is None or counted < self._proposed or self.client is None:
            return False
        step = self._proposed
        try:
            mine = "go" if counted == step and self.client.peek(f"go/{step}") else "abort"
            agreed = self.client.decide(f"decide/{step}", mine) == "go"
        except StoreGoneError:
            agreed = False
        if not agreed:
            self._proposed = None
            self.stop_at = self.settings.steps
        return agreed

    def close(self, journal: Path | None) -> None:
        """Leave: carry the journal where rank 0 cannot read it, wait for those of others (rank 0).

        Takes at most ``settings.deadline`` seconds. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)
        client, self.client = self.client, None
        if client is None:
            return
        try:
            carry.exchange(client, self.settings, self.identity, self.folder, journal, carries=self.carries)
        except StoreGoneError:
            pass
        finally:
            client.close()

    # ---- opening

    def _agree_on_folder(self) -> None:
        """Rank 0 names its folder; a rank that can see it writes there too."""
        client = self.client
        assert client is not None
        out = Path(self.settings.out)
        if self.identity.rank == 0:
            token = secrets.token_hex(8)
            with contextlib.suppress(OSError):
                out.mkdir(mode=0o700, parents=True, exist_ok=True)
                (out / f".first-node-{token}").touch(mode=0o600)
            client.set("folder", json.dumps({"out": str(out), "token": token, "run_id": self.run_id}))
            return
        if not _on_first_node():
            self._find_folder(client, out)
        client.set(f"{carry.PLACE}/{self.identity.rank}", "1")

    def _find_folder(self, client: StoreClient, out: Path) -> None:
        """A rank of perhaps another node: rank 0's folder if it is visible here, else carry."""
        limit = time.monotonic() + min(FOLDER_SECONDS, self.settings.deadline)
        said = client.peek("folder")
        while said is None and time.monotonic() < limit:
            time.sleep(0.01)
            said = client.peek("folder")
        if said is None:
            self._carry(None)
            return
        first = json.loads(said)
        self.run_id = first["run_id"]
        theirs = Path(first["out"])
        if not (theirs / f".first-node-{first['token']}").exists():
            self._carry(None)
        elif theirs != out:
            self.folder = theirs / JOURNAL_FOLDER
            self._note_moved(str(theirs))

    def _carry(self, folder: str | None) -> None:
        assert self.client is not None
        self.carries = True
        self.client.set(f"carries/{self.identity.rank}", "1")
        self._note_moved(folder)

    def _note_moved(self, folder: str | None) -> None:
        with contextlib.suppress(OSError):
            text = json.dumps({"folder": folder})
            (Path(self.settings.out) / MOVED_FILE).write_text(text)

    # ---- background thread

    def start(self) -> None:
        """Start posting and polling, when anything is to be posted."""
        if self.client is None or not (self.settings.live or self.settings.abort_on):
            return
        self._thread = threading.Thread(target=self._run, name="ddp-audit", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            posted = -1
            judged = False
            while not self._wake.wait(POLL_SECONDS):
                client = self.client
                if client is None:
                    return
                step = self._step
                if step != posted and (posted < POST_ALWAYS or step >= posted + POST_EVERY or self.settings.abort_on):
                    client.set(f"digest/{self.identity.rank}", self._post(step))
                    posted = step
                if self.settings.abort_on:
                    self._follow_stop(client)
                if self.identity.rank == 0 and not judged:
                    judged = self._look(client)
        except Exception:
            self.client = None  # the store is gone or speaks otherwise: go on without it

    def _post(self, step: int) -> str:
        return json.dumps(
            {
                "step": step,
                "counted": self._counted,
                "ranks": self.data_ranks,
                "contents": self._contents[: WARNING_STEPS + 1],
            }
        )

    def _look(self, client: StoreClient) -> bool:
        """Rank 0: compare the first steps of all ranks. True once there is nothing more to see."""
        posts: dict[int, dict[str, Any]] = {}
        for rank in range(self.identity.world_size):
            raw = client.peek(f"digest/{rank}")
            if raw is None:
                return False
            posts[rank] = json.loads(raw)
        if min(len(post["contents"]) for post in posts.values()) < WARNING_STEPS:
            return False
        same = identical_ranks({r: (p["ranks"], p["contents"][:WARNING_STEPS]) for r, p in posts.items()})
        if same:
            if self.settings.live:
                names = ", ".join(str(rank) for rank in same)
                print(
                    f"ddp-audit: ranks {names} read the same batches at the first {WARNING_STEPS} steps (DDP101)",
                    file=sys.stderr,
                    flush=True,
                )
            if self.settings.abort_on == "error":
                self._propose_stop(client, posts)
        return True

    def _propose_stop(self, client: StoreClient, posts: dict[int, dict[str, Any]]) -> None:
        counted = max(post["counted"] for post in posts.values())
        rate = counted / max(time.monotonic() - self._started, 1e-3)
        for _ in range(5):  # a fast job may pass the step before all ranks know: try further ahead
            step = self._counted + 10 + int(rate * 6 * POLL_SECONDS)
            client.set("stop", str(step))
            while self._counted < step:
                if all(client.peek(f"knows/{step}/{rank}") for rank in range(self.identity.world_size)):
                    client.set(f"go/{step}", "1")
                    return
                self._follow_stop(client)
                if self._wake.wait(POLL_SECONDS / 5):
                    return
            rate *= 2

    def _follow_stop(self, client: StoreClient) -> None:
        """Learn the proposed step and say so, as long as we have not reached it."""
        raw = client.peek("stop")
        if raw is None:
            return
        step = int(raw)
        if step == self._proposed:
            return
        # Set it first: once acknowledged, the training thread must ask when it gets there.
        self._proposed = step
        self.stop_at = step if self.settings.steps is None else min(step, self.settings.steps)
        if self._counted < step:
            client.set(f"knows/{step}/{self.identity.rank}", "1")


def identical_ranks(posts: dict[int, tuple[list[int] | None, list[int]]]) -> tuple[int, ...]:
    """Ranks whose first steps are all equal to those of another rank that should differ.

    Args:
        posts: per rank its data-parallel ranks (``None`` = unknown) and the digests of its first
            steps; 0 = not taken.

    Returns:
        Sorted ranks, empty when there are none. A rank that repeats one batch proves nothing and
        is left out: at least 8 of its digests must be distinct.
    """
    found: set[int] = set()
    by_contents: dict[tuple[int, ...], list[int]] = {}
    for rank, (_, contents) in posts.items():
        if 0 not in contents and len(set(contents)) >= 8:
            by_contents.setdefault(tuple(contents), []).append(rank)
    for ranks in by_contents.values():
        for rank in ranks:
            peers = posts[rank][0]
            if peers and any(other != rank and other in peers for other in ranks):
                found.add(rank)
    return tuple(sorted(found))


def _on_first_node() -> bool:
    """Whether the launcher's variables say that rank 0 runs on this node, so the folder is shared."""
    group_rank = os.environ.get("GROUP_RANK")
    if group_rank is not None:
        return group_rank == "0"
    return carry.one_node()


def open_channel(settings: Settings, identity: Identity) -> Channel:
    """Connect, agree on the folder, start the thread. Never raises; takes at most a few seconds."""
    channel = Channel(settings, identity)
    if settings.collector == "none" or identity.world_size < 2:
        return channel
    try:
        channel.client = _connect(identity)
        if channel.client is not None:
            channel._agree_on_folder()
            channel.start()
    except Exception:
        channel.client = None
    return channel
