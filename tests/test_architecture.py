"""What holds the rooms apart, what stays unloaded, and the lists that never change."""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from jobs import clean_environment, ddp_audit

import ddp_audit as package
from ddp_audit.cli import exit_codes, main

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ddp_audit"

ROOMS = (
    "__main__",
    "cli",
    "render",
    "judge",
    "compare",
    "scaling",
    "checks",
    "wandb_scan",
    "collect",
    "hooks",
    "boot",
    "fixes",
    "integrations",
    "journal",
    "settings",
    "records",
)
"""From the top down: a room imports only rooms after it."""

UPWARD = {
    # The rank opens its channel when it proves to be one; nothing of collect knows hooks, so no circle is made.
    ("hooks", "ddp_audit.collect.channel"),
    # ``ddp_audit.record_samples`` is part of the package itself; see ``test_package_imports_nothing``.
}
APART = {"render", "checks", "hooks", "wandb_scan"}
HEAVY = ("torch", "wandb", "pandas", "matplotlib")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports() -> Iterator[tuple[str, str, str]]:
    """(file, its room, imported module of ours), those inside functions and for type checking too."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}:{node.lineno}: a relative import"
                module = node.module or ""
                targets = [f"{module}.{alias.name}" for alias in node.names] if module == "ddp_audit" else [module]
            else:
                continue
            for target in targets:
                if target.startswith("ddp_audit."):
                    yield name, room_of(path), target


def test_every_room_is_known() -> None:
    known = {*ROOMS, "__init__", "demo", "schemas", "py.typed", "__pycache__"}
    assert {path.name.removesuffix(".py") for path in PACKAGE.iterdir()} <= known


def test_imports_point_down() -> None:
    wrong = []
    for name, room, target in imports():
        other = target.split(".")[1]
        if room == "__init__" or (room, target) in UPWARD or other not in ROOMS or room == other:
            continue
        if ROOMS.index(other) < ROOMS.index(room):
            wrong.append(f"{name} imports {target}")
    assert not wrong


def test_render_checks_hooks_and_wandb_scan_never_import_each_other() -> None:
    wrong = [
        f"{n} imports {t}" for n, room, t in imports() if {room, t.split(".")[1]} <= APART and room != t.split(".")[1]
    ]
    assert not wrong


def test_only_cli_prints() -> None:
    """The demo's jobs are jobs and may print. A live warning is written to stderr by the collector, by name."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if room_of(path) not in ("cli", "demo", "scaling")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and not any(keyword.arg == "file" for keyword in node.keywords)
    ]
    assert not wrong


def test_checks_read_no_files_and_know_no_torch() -> None:
    forbidden = {"torch", "os", "pathlib", "subprocess", "socket", "io", "tempfile"}
    for path in sorted((PACKAGE / "checks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & forbidden, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, path


def loaded(code: str, *watched: str) -> list[str]:
    """Which of the watched top-level modules a fresh interpreter holds after ``code``."""
    code += f"\nimport sys, json\nprint('LOADED ' + json.dumps([m for m in {watched!r} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=clean_environment()
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    names: list[str] = json.loads(line.removeprefix("LOADED "))
    return names


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import ddp_audit", id="package"),
        pytest.param("import ddp_audit.cli.main", id="cli"),
        pytest.param("from ddp_audit.cli.main import run; run(['--help'])", id="help"),
        pytest.param("from ddp_audit.cli.main import run; run(['probe', '--help'])", id="probe-help"),
        pytest.param("from ddp_audit.cli.main import run; run(['demo', '--help'])", id="demo-help"),
        pytest.param("from ddp_audit.cli.main import run; run(['checks'])", id="checks"),
    ],
)
def test_no_heavy_module_is_loaded(code: str) -> None:
    assert loaded(code, *HEAVY) == []


def test_package_imports_nothing() -> None:
    """``import ddp_audit`` stands in users' loops: it must cost nothing without a probe."""
    code = "import ddp_audit\nif hasattr(ddp_audit, 'record_samples'): ddp_audit.record_samples([1, 2])"
    assert loaded(code, *HEAVY, "numpy", "click", "rich", "jinja2", "xxhash") == []


@pytest.mark.distributed
def test_the_supervising_process_loads_no_torch(tmp_path: Path) -> None:
    """It starts a job that trains, waits, merges, judges and writes the reports."""
    script = PACKAGE / "demo" / "fixed.py"
    words = ["probe", "--out", str(tmp_path / "out"), "--", sys.executable, "-m", "torch.distributed.run"]
    words += ["--standalone", "--nproc-per-node=2", str(script)]
    assert loaded(f"from ddp_audit.cli.main import run; assert run({words!r}) == 0", "torch", "wandb") == []
    assert (tmp_path / "out" / "audit.json").exists()


def test_boot_loads_only_the_standard_library(tmp_path: Path) -> None:
    code = "import sys, json; print('LOADED ' + json.dumps(sorted(sys.modules)))"

    def modules(*words: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, *words, sys.executable, "-c", code] if words else [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=clean_environment(),
            cwd=tmp_path,
        )
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOADED ")]
        return set(json.loads(line.removeprefix("LOADED ")))

    probed = modules("-m", "ddp_audit", "probe", "--out", str(tmp_path / "out"), "--")
    added = {name for name in probed - modules() if name.split(".")[0] not in sys.stdlib_module_names}
    assert "ddp_audit.boot" in added, "the probe did not start in the child"
    assert {name for name in added if not name.startswith("ddp_audit")} <= {"sitecustomize"}
    assert {name.split(".")[1] for name in added if "." in name} <= {"boot", "settings"}


# --------------------------------------------------------------------------- lists that are only added to


def test_commands_are_frozen() -> None:
    assert set(main.COMMANDS) == {"probe", "report", "checks", "explain", "demo", "schema"}


def test_exit_codes_are_frozen() -> None:
    codes = exit_codes
    assert (codes.OK, codes.FINDING, codes.BAD_INPUT, codes.INCONCLUSIVE, codes.INTERNAL_ERROR) == (0, 1, 2, 3, 4)


def test_options_are_frozen() -> None:
    context = click.Context(main.group)
    options = {}
    for name in ("probe", "report", "demo"):
        command = main.group.get_command(context, name)
        assert command is not None
        options[name] = {
            word for p in command.params if isinstance(p, click.Option) for word in p.opts + p.secondary_opts
        }
    assert options["demo"] >= {"--out"}
    assert options["report"] >= {"-f", "--format", "-o", "--fail-on", "--allow-inconclusive"}
    assert options["probe"] >= {
        "--out",
        "--steps",
        "--every",
        "--collector",
        "--mesh",
        "--dp-size",
        "--fail-on",
        "--require",
        "--abort-on",
        "--deadline",
        "--disk-cap",
        "--no-live",
    }


def test_ids_are_frozen() -> None:
    from ddp_audit.checks import ALL_CHECKS

    assert {info.id: info.kind for info in (check.CHECK for check in ALL_CHECKS)} == {
        "DDP101": "identical-data-across-ranks",
        "DDP102": "overlapping-shards",
        "DDP103": "full-dataset-per-rank",
        "DDP104": "double-sharding",
        "DDP105": "duplicates-across-workers",
        "DDP106": "set-epoch-missing",
        "DDP107": "uneven-shards",
        "DDP108": "dropped-data",
        "DDP201": "no-process-group",
        "DDP202": "gradients-not-synced",
        "DDP203": "ddp-forward-bypassed",
        "DDP206": "initial-weights-differ",
        "DDP207": "params-diverge",
    }


def test_each_check_has_a_file_named_by_id_and_kind() -> None:
    from ddp_audit.checks import ALL_CHECKS

    names = {path.stem for path in (PACKAGE / "checks").glob("ddp[0-9]*.py")}
    infos = [check.CHECK for check in ALL_CHECKS]
    assert names == {f"{info.id.lower()}_{info.kind.replace('-', '_')}" for info in infos}


def test_schema_keys_are_frozen() -> None:
    schema = json.loads((PACKAGE / "schemas" / "audit-1.0.json").read_text())
    assert set(schema["properties"]) >= {
        "schema_version",
        "tool",
        "verdict",
        "headline",
        "world_size",
        "ranks_seen",
        "replicas",
        "effective_gpus",
        "effective_gpus_measured",
        "distinct_fraction",
        "distinct_fraction_step",
        "distinct_fraction_epoch",
        "attempts",
        "groups",
        "series",
        "checks",
        "overhead",
        "provenance",
    }


def test_version_is_said_once(tmp_path: Path) -> None:
    assert ddp_audit("--version", cwd=tmp_path).stdout.split()[-1] == package.__version__


# --------------------------------------------------------------------------- nothing of one machine


def tracked_text() -> Iterator[tuple[str, str]]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no git checkout")
    for name in filter(None, done.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (data := path.read_bytes()):
            yield name, data.decode(errors="replace")


def test_no_file_names_a_machine() -> None:
    """Absolute paths of a person or a workplace, this machine's name, and addresses of package hosts."""
    homes = re.compile(r"(?<![\w.])/(?:home|root|Users|work)/\w{2}")
    link = re.compile(r"https?://([\w.-]+)")
    allowed = {"www.apache.org", "www.w3.org", "json-schema.org", "127.0.0.1"}
    own = socket.gethostname()
    wrong = []
    for name, text in tracked_text():
        wrong += [f"{name}: {found.group()}" for found in homes.finditer(text)]
        wrong += [f"{name}: {host}" for host in link.findall(text) if host not in allowed and "." in host]
        if len(own) > 5 and own != "localhost" and own in text:
            wrong.append(f"{name}: this machine's name")
    assert not wrong
