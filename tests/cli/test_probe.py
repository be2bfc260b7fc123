"""``ddp-audit probe`` from outside: options, folders, codes, the reasons for zero ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launching import PROBE, ROOT, environment, run

from ddp_audit.cli.main import COMMANDS

CLI = (sys.executable, "-m", "ddp_audit")
TORCH_NEVER_MET = "torch was never imported"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text("print('ran', flush=True)\n")
    return tmp_path


def reason(out: Path) -> str:
    value = json.loads((out / "run.json").read_text())["zero_reason"]
    assert isinstance(value, str)
    return value


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("probe",), "no command given"),
        (("probe", "--"), "no command given"),
        (("probe", "--no-such", "job.py"), "no such option '--no-such'"),
        (("probe", "nope.py"), "script 'nope.py' does not exist"),
        (("probe", "no-such-command"), "command 'no-such-command' was not found"),
        (("probe", "--steps", "0", "job.py"), "0 is not in the range"),
        (("probe", "--steps", "many", "job.py"), "'many' is not a valid integer"),
        (("probe", "--mesh", "dp", "job.py"), "'dp' is not NAME=SIZE"),
        (("probe", "--require", "everything", "job.py"), "'everything' is no check"),
        (("probe", "--dp-size", "3", "-m", "torch.distributed.run", "--nproc-per-node=2", "job.py"), "does not divide"),
        (("prob",), "did you mean 'probe'?"),
        (("--no-such",), "no such option"),
    ],
)
def test_bad_usage_is_one_line(here: Path, words: tuple[str, ...], says: str) -> None:
    done = run((*CLI, *words), here)
    assert done.returncode == 2
    assert says in done.stderr.lower() or says in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert os.listdir(here) == ["job.py"]


def test_help_loads_nothing_heavy(here: Path) -> None:
    code = textwrap.dedent("""
        import sys
        from ddp_audit.cli.main import run
        assert run(sys.argv[1:]) == 0
        heavy = {"torch", "wandb", "pandas", "matplotlib", "numpy", "jinja2", "rich"} & set(sys.modules)
        assert not heavy, heavy
    """)
    for words in (["--help"], ["-h"], ["probe", "--help"], ["--version"]):
        done = run((sys.executable, "-c", code, *words), here)
        assert done.returncode == 0, done.stderr
    assert "torchrun --nproc-per-node=2 --no-python ddp-audit probe train.py" in run((*CLI, "probe", "-h"), here).stdout


def test_the_supervisor_loads_no_torch(here: Path) -> None:
    code = textwrap.dedent("""
        import sys
        from ddp_audit.cli.main import run
        assert run(sys.argv[1:]) == 0
        assert not {"torch", "wandb", "pandas"} & set(sys.modules)
    """)
    done = run((sys.executable, "-c", code, "probe", "job.py"), here)
    assert done.returncode == 0, done.stderr


def test_the_list_of_commands_is_whole() -> None:
    files = {p.stem for p in (ROOT / "ddp_audit" / "cli").glob("*.py")}
    assert set(COMMANDS) <= files


@pytest.mark.parametrize("dashes", [(), ("--",)])
@pytest.mark.parametrize("before", [(), ("--steps", "3"), ("--no-live", "--deadline=5")])
def test_options_of_the_job_are_its_own(here: Path, dashes: tuple[str, ...], before: tuple[str, ...]) -> None:
    (here / "args.py").write_text("import sys; print(sys.argv)\n")
    own = ["--steps", "7", "--out", "x", "-m", "y", "--", "--help"]
    done = run((*CLI, "probe", *before, *dashes, "args.py", *own), here)
    assert done.stdout.startswith(f"{['args.py', *own]}\n")
    assert not (here / "x").exists()


def test_variables_mirror_options(here: Path) -> None:
    done = run((*CLI, "probe", "job.py"), here, environment(DDP_AUDIT_OUT="there", DDP_AUDIT_STEPS="5"))
    assert done.returncode == 0
    written = json.loads((here / "there" / "run.json").read_text())
    assert (written["steps"], written["script"], written["form"]) == (5, "job.py", "supervise")
    assert "job.py" not in json.dumps({k: v for k, v in written.items() if k != "script"})


def test_dp_size_is_a_mesh(here: Path) -> None:
    words = ("probe", "--out", "o", "--dp-size", "2", "-m", "torch.distributed.run", "--nproc-per-node=4", "--help")
    run((*CLI, *words), here)
    assert json.loads((here / "o" / "run.json").read_text())["mesh"] == [["dp", 2], ["mp", 2]]


def test_nothing_writable_the_job_runs(here: Path) -> None:
    (here / "file").write_text("")
    done = run((*CLI, "probe", "--out", "file/out", "--", sys.executable, "-c", "raise SystemExit(3)"), here)
    assert done.returncode == 3
    assert done.stderr.startswith("ddp-audit: the job runs unprobed")
    assert done.stderr.count("\n") == 1


def test_fail_on_is_refused_inside_a_rank(here: Path) -> None:
    env = environment(RANK="0", WORLD_SIZE="1")
    done = run((*CLI, "probe", "--out", "o", "--fail-on", "error", "job.py"), here, env)
    assert done.returncode == 2
    assert "ddp-audit report o --fail-on error" in done.stderr
    assert "ran" not in done.stdout


def test_no_rank_seen_the_jobs_code_stands(here: Path) -> None:
    assert run((*PROBE, "job.py"), here).returncode == 0
    assert run((*PROBE, "--fail-on", "error", "job.py"), here).returncode == 3
    assert run((*PROBE, "--fail-on", "error", "--allow-inconclusive", "job.py"), here).returncode == 0
    (here / "job.py").write_text("raise SystemExit(7)\n")
    assert run((*PROBE, "--fail-on", "error", "job.py"), here).returncode == 7


def test_closed_streams_stay_closed_and_cost_nothing(here: Path) -> None:
    """A daemon's job: standard output and error closed before the start."""
    (here / "job.py").write_text(
        "import os\nstates = []\nfor fd in (1, 2):\n    try:\n        os.fstat(fd)\n        states.append('open')\n"
        "    except OSError:\n        states.append('closed')\nopen('states', 'w').write(' '.join(states))\n"
    )
    words = (*CLI, "probe", "--out", "out", sys.executable, "job.py")
    done = run(("sh", "-c", 'exec "$@" >&- 2>&-', "sh", *words), here)
    assert done.returncode == 0
    assert (here / "states").read_text() == "closed closed"
    assert (here / "out" / "audit.json").exists()


def test_a_bug_is_one_line_and_code_4(here: Path) -> None:
    code = (
        "import sys, ddp_audit.cli.main as m, ddp_audit.boot.command as c\n"
        "def broken(*a): raise RuntimeError('two\\nlines')\n"
        "c.plan = broken\n"
        "sys.exit(m.run(sys.argv[1:]))\n"
    )
    done = run((sys.executable, "-c", code, "probe", "job.py"), here)
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert "RuntimeError: two lines" in done.stderr
    done = run((sys.executable, "-c", code, "--debug", "probe", "job.py"), here)
    assert done.returncode == 4
    assert "Traceback" in done.stderr


class TestZeroRanks:
    """Each reason that can be made here."""

    def said(self, here: Path, *words: str, **env: str) -> str:
        done = run((*PROBE, "--out", "o", *words), here, environment(**env))
        assert done.returncode == 0, done.stderr
        found = reason(here / "o")
        assert f"No rank was seen: {found}" in " ".join(done.stdout.split())
        assert " ".join(done.stdout.split()).count(found) == 1
        assert found not in " ".join(done.stderr.split())
        return found

    def test_torch_never_imported(self, here: Path) -> None:
        assert TORCH_NEVER_MET in self.said(here, "job.py")

    @pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
    def test_isolated_python(self, here: Path, flag: str) -> None:
        (here / "job.py").write_text("import time; time.sleep(0.8)\n")
        assert "-I, -E or -S" in self.said(here, sys.executable, flag, "job.py")

    def test_environment_not_passed_on(self, here: Path) -> None:
        (here / "job.py").write_text("import time; time.sleep(0.8)\n")
        (here / "run.sh").write_text(f"env -i {sys.executable} job.py\n")
        assert "environment was not passed on" in self.said(here, "sh", "run.sh")

    def test_no_python_at_all(self, here: Path) -> None:
        assert "no Python process started" in self.said(here, "sleep", "0.1")

    def test_torch_but_no_training(self, here: Path) -> None:
        (here / "torch.py").write_text("")
        (here / "job.py").write_text("import torch\n")
        assert "torch was imported, but" in self.said(here, "job.py")

    def test_fewer_processes_than_asked(self, here: Path) -> None:
        (here / "srun").write_text(f'#!/bin/sh\nexec {sys.executable} -c "import subprocess, sys; '
                                   f"subprocess.run([sys.executable, 'job.py'])\"\n")  # fmt: skip
        (here / "srun").chmod(0o755)
        said = self.said(here, "srun", "-n", "4", "job.py", PATH=f"{here}:{os.environ['PATH']}")
        assert "asked for 4 ranks; 1 Python process started" in said

    def test_inside_a_rank(self, here: Path) -> None:
        done = run((*PROBE, "--out", "o", "job.py"), here, environment(RANK="0", WORLD_SIZE="1"))
        assert done.returncode == 0
        assert TORCH_NEVER_MET in reason(here / "o")
        assert f"No rank was seen: {TORCH_NEVER_MET}" in " ".join(done.stdout.split())


def test_ranks_started_by_one_shell_share_a_folder(here: Path) -> None:
    """Two plain processes with RANK set: one folder, and a second pair makes a second launch of it."""
    (here / "job.py").write_text("import time; time.sleep(2)\n")  # ranks of a real job meet before either ends
    for _ in range(2):
        env = environment(MASTER_ADDR="localhost", MASTER_PORT="29555", WORLD_SIZE="2")
        ranks = [
            subprocess.Popen([*PROBE, "job.py"], cwd=here, env={**env, "RANK": str(rank)}, stdout=subprocess.DEVNULL)
            for rank in range(2)
        ]
        assert [rank.wait(timeout=30) for rank in ranks] == [0, 0]
    made = [p for p in (here / "ddp-audit-out").iterdir() if not p.name.startswith(".") and p.name != "latest"]
    assert len(made) == 1
    assert (made[0] / "processes.jsonl").read_text().count("start") == 2
