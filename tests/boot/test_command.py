"""Which form a command gets, and what is read from it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launching import environment

from ddp_audit.boot.command import CommandError, Plan, interpreter, plan, rank_of

RANK = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("torchrun", "accelerate", "srun", "mpirun", "deepspeed", "bash2", "python3.12", "run.sh"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("")


def planned(words: str, **env: str) -> Plan:
    return plan(words.split(), {"PATH": str(Path.cwd() / "bin"), **env}, "/nowhere/ddp-audit", False)


@pytest.mark.parametrize(
    ("words", "ranks", "script"),
    [
        ("torchrun --nproc-per-node=4 train.py --nproc-per-node=9", 4, "train.py"),
        ("torchrun --nproc_per_node 4 --nnodes 2 train.py", 8, "train.py"),
        ("torchrun --nproc-per-node=gpu train.py", None, "train.py"),
        ("torchrun train.py", 1, "train.py"),
        ("torchrun --nnodes=1:4 --nproc-per-node=2 train.py", None, "train.py"),
        ("python3.12 -u -m torch.distributed.run --nproc-per-node=2 train.py", 2, "train.py"),
        ("python3.12 -m torch.distributed.launch --nproc_per_node=3 -m pkg.train", 3, None),
        ("-m torch.distributed.run --nproc-per-node=2 train.py", 2, "train.py"),
        ("accelerate launch --num_processes 3 train.py", 3, "train.py"),
        ("accelerate launch train.py", None, "train.py"),
        ("srun -n 4 python train.py", 4, "train.py"),
        ("srun -N 2 --ntasks-per-node=4 python train.py", 8, "train.py"),
        ("mpirun -np 2 python train.py", 2, "train.py"),
        ("deepspeed --num_gpus=2 train.py", 2, "train.py"),
    ],
)
@pytest.mark.parametrize("env", [{}, RANK], ids=["outside", "in-a-rank"])
def test_launchers_are_supervised(words: str, ranks: int | None, script: str | None, env: dict[str, str]) -> None:
    found = planned(words, **env)
    assert (found.form, found.launcher_ranks, found.script) == ("supervise", ranks, script)
    assert found.launcher is not None


@pytest.mark.parametrize(
    "words", ["train.py --x", "-m pkg.train", "python3.12 train.py", "python3.12 -W error -m pkg", "app", "run.sh a"]
)
def test_a_program_is_supervised_outside_and_become_inside(words: str) -> None:
    assert planned(words).form == "supervise"
    assert planned(words, **RANK).form == "rank"
    assert planned(words).launcher is None


def test_what_is_run() -> None:
    assert planned("train.py -x 1").argv[1:] == ("train.py", "-x", "1")
    assert planned("train.py -x 1", **RANK).argv[1:] == ("-u", "train.py", "-x", "1")
    assert planned("python3.12 train.py", **RANK).argv == ("python3.12", "train.py")
    assert planned("run.sh a").executable == str(Path("bin/run.sh").resolve())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("nope.py", "script 'nope.py' does not exist"),
        ("python3.12 -u nope.py", "script 'nope.py' does not exist"),
        ("torchrum train.py", "command 'torchrum' was not found"),
        ("./train.txt", "command './train.txt' is not executable"),
        ("-m", "-m needs the name of a module"),
    ],
)
def test_what_cannot_run(words: str, text: str) -> None:
    Path("train.txt").write_text("")
    with pytest.raises(CommandError, match=f"^{text}$"):
        planned(words)


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({}, None),
        (RANK, (1, 2)),
        ({"RANK": "1"}, None),
        ({"RANK": "", "WORLD_SIZE": "2"}, None),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, (3, 4)),
        pytest.param({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None, id="the batch script itself"),
        pytest.param({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, None, id="one interactive task"),
    ],
)
def test_rank_of(env: dict[str, str], rank: tuple[int, int] | None) -> None:
    assert rank_of(env) == rank


def test_nodes_of_one_job_have_one_key() -> None:
    base = "torchrun --nnodes=2 --nproc-per-node=2 --master-addr=a --master-port=1 --node-rank={} train.py"
    assert planned(base.format(0)).job_key == planned(base.format(1)).job_key != ""
    assert planned(base.format(0)).num_nodes == 2
    assert planned("torchrun --nproc-per-node=2 --master-port=1 train.py").job_key == ""


class TestInterpreter:
    def python(self, folder: Path) -> str:
        (folder / "bin").mkdir(parents=True)
        path = folder / "bin" / "python"
        path.symlink_to(sys.executable)
        return str(path)

    def test_as_a_module_ours(self, tmp_path: Path) -> None:
        env = {"VIRTUAL_ENV": str(tmp_path / "venv"), "PATH": "/nowhere"}
        self.python(tmp_path / "venv")
        assert interpreter(env, "/x/__main__.py", True, False) == sys.executable

    def test_an_activated_environment(self, tmp_path: Path) -> None:
        python = self.python(tmp_path / "venv")
        assert interpreter({"VIRTUAL_ENV": str(tmp_path / "venv"), "PATH": ""}, "/x", False, False) == python

    def test_called_from_its_own_folder(self, tmp_path: Path) -> None:
        other = self.python(tmp_path / "venv")
        ours = str(Path(sys.executable).with_name("ddp-audit-test"))
        env = {"PATH": os.path.dirname(other)}
        Path(tmp_path / "ddp-audit").write_text("")
        assert interpreter(env, str(tmp_path / "ddp-audit"), False, False) == other
        if os.path.exists(ours):
            assert interpreter(env, ours, False, False) == sys.executable

    def test_nothing_else_there(self) -> None:
        assert interpreter({"PATH": "/nowhere"}, "/nowhere/ddp-audit", False, False) == sys.executable

    def test_in_the_environment_of_the_tests(self) -> None:
        assert interpreter(environment(), sys.argv[0], True, True) == sys.executable
