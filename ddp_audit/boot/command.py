"""What kind of command was given: a launcher of ranks, or a program that is one.

Pure: looks at words, environment and the file system, starts nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCHERS = frozenset(
    {"torchrun", "accelerate", "accelerate-launch", "deepspeed", "srun", "sbatch", "salloc", "mpirun", "mpiexec"}
    | {"mpiexec.hydra", "orterun", "horovodrun", "composer", "colossalai", "lightning", "fabric", "torchx", "jsrun"}
    | {"aprun", "flux", "parallel", "ssh", "pdsh"}
)
LAUNCHER_MODULES = frozenset(
    {"torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch"}
    | {"accelerate.commands.accelerate_cli", "deepspeed", "deepspeed.launcher.runner", "lightning"}
    | {"lightning.fabric.cli", "composer", "composer.cli", "horovod.runner", "torchx"}
)
PYTHON = re.compile(r"^(python|pypy)\d*(\.\d+)?t?$")
PYTHON_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
RANKS_OPTIONS = {  # per launcher: options that ask for a number of ranks, or for ranks per node
    "torchrun": (("--nproc-per-node", "--nproc_per_node"), ("--nnodes",), ()),
    "accelerate": ((), (), ("--num_processes", "--num-processes")),
    "srun": (("--ntasks-per-node",), ("-N", "--nodes"), ("-n", "--ntasks")),
    "mpirun": (("-npernode", "--npernode", "-ppn"), (), ("-np", "-n", "--np", "--n", "-c")),
    "deepspeed": (("--num_gpus",), ("--num_nodes",), ()),
}
JOB_OPTIONS = (  # what the nodes of one torchrun job have in common
    ("--rdzv-id", "--rdzv_id"),
    ("--rdzv-endpoint", "--rdzv_endpoint"),
    ("--master-addr", "--master_addr"),
    ("--master-port", "--master_port"),
)


class CommandError(ValueError):
    """The command cannot be started; the text says why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to start a command.

    Attributes:
        form: ``supervise``: start it as a child; ``rank``: become it.
        argv: the words to run; ``argv[0]`` is what the program sees as its name.
        executable: file to run.
        script: base name of the Python script or module, where it could be read.
        launcher: name of the launcher; ``None`` = a program of its own.
        launcher_ranks: ranks the launcher was asked for, in all; ``None`` = not readable.
        num_nodes: nodes the launcher was asked for; 1 when nothing says.
        job_key: what the launchers of all nodes of this job were given alike; "" on one node.
    """

    form: str
    argv: tuple[str, ...]
    executable: str
    script: str | None = None
    launcher: str | None = None
    launcher_ranks: int | None = None
    num_nodes: int = 1
    job_key: str = ""


def rank_of(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """(rank, world size) that the environment names, or ``None``.

    SLURM sets its variables for the batch script and for a step of one task too; only a task of a
    step of several is a rank.
    """
    for rank, size in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        pair = _numbers(environ, rank, size)
        if pair is not None:
            return pair
    pair = _numbers(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS") or _numbers(
        environ, "SLURM_PROCID", "SLURM_NTASKS"
    )
    if pair is not None and "SLURM_STEP_ID" in environ and pair[1] > 1:
        return pair
    return None


def _numbers(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int] | None:
    try:
        return int(environ[rank]), int(environ[size])
    except (KeyError, ValueError):
        return None


def plan(command: Sequence[str], environ: Mapping[str, str], argv0: str, as_module: bool) -> Plan:
    """Decide the form.

    Args:
        command: the words after ``probe`` and its options; not empty.
        environ: of this process.
        argv0: how ddp-audit itself was called.
        as_module: it was called as ``python -m ddp_audit``.

    Raises:
        CommandError: script or executable do not exist.
    """
    words = list(command)
    ranked = rank_of(environ) is not None
    first = words[0]
    name = os.path.basename(first)
    if first == "-m" or _is_script(first):
        if first == "-m" and len(words) < 2:
            raise CommandError("-m needs the name of a module")
        if first == "-m" and words[1] in LAUNCHER_MODULES:
            python = interpreter(environ, argv0, as_module, ranked)
            return _launcher(python, (python, *words), words[1], words[2:])
        if first != "-m" and not os.path.exists(first):
            raise CommandError(f"script '{first}' does not exist")
        python = interpreter(environ, argv0, as_module, ranked)
        # -u as torchrun itself would: lines of several ranks must not sit in a buffer
        options = ("-u",) if ranked else ()
        return Plan(
            form="rank" if ranked else "supervise",
            argv=(python, *options, *words),
            executable=python,
            script=words[1] if first == "-m" else name,
        )
    executable = shutil.which(first, path=environ.get("PATH", os.defpath))
    if executable is None:
        what = "is not executable" if os.path.isfile(first) else "was not found"
        raise CommandError(f"command '{first}' {what}")
    if name in LAUNCHERS:
        return _launcher(executable, tuple(words), name, words[1:])
    script: str | None = None
    if PYTHON.match(name):
        at = _program(words)
        if at < len(words) and words[at] == "-m" and at + 1 < len(words):
            if words[at + 1] in LAUNCHER_MODULES:
                return _launcher(executable, tuple(words), words[at + 1], words[at + 2 :])
            script = words[at + 1]
        elif at < len(words) and not words[at].startswith("-"):
            script = os.path.basename(words[at])
            if not os.path.exists(words[at]):
                raise CommandError(f"script '{words[at]}' does not exist")
    return Plan(form="rank" if ranked else "supervise", argv=tuple(words), executable=executable, script=script)


def _is_script(word: str) -> bool:
    """A Python program by its name or, for a folder, by what it holds; as ``python WORD`` would run it."""
    return word.endswith((".py", ".pyc", ".pyz")) or os.path.isfile(os.path.join(word, "__main__.py"))


def _program(words: Sequence[str]) -> int:
    """Position of the script, ``-m``, ``-c`` or ``-`` among the words of a python command."""
    at = 1
    while at < len(words):
        word = words[at]
        if word in PYTHON_OPTIONS_WITH_VALUE:
            at += 2
        elif word in ("-m", "-c", "-") or not word.startswith("-"):
            return at
        else:
            at += 1
    return at


def _launcher(executable: str, argv: tuple[str, ...], name: str, rest: Sequence[str]) -> Plan:
    family = _family(name)
    per_node_names, nodes_names, total_names = RANKS_OPTIONS.get(family, ((), (), ()))
    per_node = _number(_value(rest, per_node_names))
    nodes_text = _value(rest, nodes_names)
    nodes = _number(nodes_text)
    total = _number(_value(rest, total_names))
    if total is None and per_node is not None and (nodes is not None or nodes_text is None):
        total = per_node * (nodes or 1)
    if total is None and family == "torchrun" and not per_node_names_given(rest, per_node_names):
        total = nodes or (1 if nodes_text is None else None)  # torchrun starts one per node unless told
    # An elastic range (1:4) leaves the number open; it may well be several nodes.
    num_nodes = nodes if nodes is not None else (2 if nodes_text and ":" in nodes_text else 1)
    key = ""
    if family == "torchrun" and num_nodes > 1:
        key = "|".join(_value(rest, names) or "" for names in JOB_OPTIONS)
    return Plan(
        form="supervise",
        argv=argv,
        executable=executable,
        script=_script_among(rest),
        launcher=family,
        launcher_ranks=total,
        num_nodes=num_nodes,
        job_key=key.strip("|"),
    )


def per_node_names_given(rest: Sequence[str], names: Sequence[str]) -> bool:
    """Whether an option is there at all, readable as a number or not (``gpu``, ``auto``)."""
    return _value(rest, names) is not None


def _family(name: str) -> str:
    if name.startswith("torch"):
        return "torchrun"
    for family in ("accelerate", "deepspeed"):
        if name.startswith(family):
            return family
    return {"mpiexec": "mpirun", "orterun": "mpirun", "mpiexec.hydra": "mpirun"}.get(name, name)


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    """Value of an option among the launcher's words, which end at the first script."""
    for at, word in enumerate(words):
        if _is_script(word) and not word.startswith("-"):
            return None
        key, equals, value = word.partition("=")
        if key in names:
            if equals:
                return value
            return words[at + 1] if at + 1 < len(words) else None
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _script_among(words: Sequence[str]) -> str | None:
    for word in words:
        if word.endswith(".py") and not word.startswith("-"):
            return os.path.basename(word)
    return None


def interpreter(environ: Mapping[str, str], argv0: str, as_module: bool, ranked: bool) -> str:
    """The Python that runs a script given without one.

    In order: the one that runs us, when we were called as ``python -m ddp_audit``; under a torchrun
    agent the agent's own, as torchrun itself would take; that of an activated environment; ours, when
    ``ddp-audit`` was called from its folder or that folder comes first on PATH; the first ``python``
    on PATH; ours.
    """
    if as_module:
        return sys.executable
    if ranked and "TORCHELASTIC_RUN_ID" in environ:
        agent = _parent_python(environ)
        if agent is not None:
            return agent
    active = environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX")
    if active:
        python = os.path.join(active, "bin", "python")
        if os.access(python, os.X_OK):
            return sys.executable if _same_folder(python, sys.executable) else python
    path = environ.get("PATH", os.defpath)
    first = shutil.which("python", path=path) or shutil.which("python3", path=path)
    called = shutil.which("ddp-audit", path=path)
    by_path = called is None or not os.path.samefile(called, argv0) if os.path.exists(argv0) else False
    if first is None or _same_folder(first, sys.executable) or (by_path and _same_folder(argv0, sys.executable)):
        return sys.executable
    return first


def _same_folder(one: str, other: str) -> bool:
    return os.path.realpath(os.path.dirname(one)) == os.path.realpath(os.path.dirname(other))


def _parent_python(environ: Mapping[str, str]) -> str | None:
    """Interpreter of the parent process as it was called; the link and not its target, for it is the venv's."""
    try:
        word = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0", 1)[0].decode()
    except (OSError, UnicodeDecodeError):
        return None
    if not PYTHON.match(os.path.basename(word)):
        return None
    return shutil.which(word, path=environ.get("PATH", os.defpath))
