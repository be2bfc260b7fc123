"""Law 1 at launch: a program sees the same world with and without the probe."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launching import PROBE, environment, run, without_ours

LOOK = """
    import json, os, pickle, sys, multiprocessing as mp

    class Thing:
        def __init__(self, value):
            self.value = value

    def child(queue, thing):
        queue.put([type(thing).__module__, thing.value, sys.argv, "sitecustomize" in str(sys.path)])

    def main():
        spec = None if __spec__ is None else [__spec__.name, __spec__.origin]
        seen = {
            "name": __name__, "argv": sys.argv, "file": __file__, "path": sys.path, "spec": spec,
            "pickle": pickle.loads(pickle.dumps(Thing(7))).value,
            "main": sys.modules["__main__"].__dict__["Thing"] is Thing,
            "flags": list(sys.flags), "hooks": len(sys.path_hooks), "cwd": os.getcwd(),
            "package": __package__, "loader": type(__loader__).__name__,
        }
        for method in ("fork", "spawn", "forkserver"):
            context = mp.get_context(method)
            queue = context.Queue()
            process = context.Process(target=child, args=(queue, Thing(method)))
            process.start()
            seen[method] = queue.get(timeout=30)
            process.join()
            seen[method].append(process.exitcode)
        with open("seen.json", "w") as file:
            json.dump(seen, file)

    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "look.py").write_text(textwrap.dedent(LOOK))
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "look.py").write_text(textwrap.dedent(LOOK))
    return tmp_path


def seen(here: Path, words: tuple[str, ...], **env: str) -> dict[str, object]:
    done = run(words, here, environment(**env))
    assert done.returncode == 0, done.stderr
    value: dict[str, object] = json.loads((here / "seen.json").read_text())
    (here / "seen.json").unlink()
    return value


@pytest.mark.parametrize("job", [("look.py", "--lr", "3"), ("./look.py",), ("-m", "pkg.look", "-x", "--out", "y")])
@pytest.mark.parametrize("form", ["supervise", "python", "rank"])
def test_what_a_program_sees(here: Path, job: tuple[str, ...], form: str) -> None:
    flags = ("-u",) if form == "rank" else ()
    rank = {"RANK": "0", "WORLD_SIZE": "1"} if form == "rank" else {}
    plain = seen(here, (sys.executable, *flags, *job), **rank)
    command = (sys.executable, *job) if form == "python" else job
    probed = seen(here, (*PROBE, *command), **rank)
    assert probed == plain


def test_a_hidden_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys; sys.was_here = 'yes'\n")
    (tmp_path / "job.py").write_text("import sys, sitecustomize; print(sys.was_here, sitecustomize.__file__)\n")
    env = environment(PYTHONPATH=os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path / "site")]))
    plain = run((sys.executable, "job.py"), tmp_path, env)
    probed = run((*PROBE, "job.py"), tmp_path, env)
    assert plain.stdout.startswith("yes ")
    assert without_ours(probed.stdout).startswith(plain.stdout)


def test_the_error_of_a_hidden_sitecustomize_is_shown_as_ever(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("raise ValueError('no')\n")
    (tmp_path / "job.py").write_text("print('ran')\n")
    env = environment(PYTHONPATH=os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path / "site")]))
    plain = run((sys.executable, "job.py"), tmp_path, env)
    probed = run((*PROBE, "--", sys.executable, "job.py"), tmp_path, env)
    assert "ValueError: no" in plain.stderr
    assert plain.stderr in probed.stderr
    assert probed.stdout.startswith("ran\n")


@pytest.mark.parametrize("how", ["script", "python", "rank"])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        pytest.param("pass", 0, id="0"),
        pytest.param("sys.exit(3)", 3, id="3"),
        pytest.param("raise ValueError('mine')", 1, id="exception"),
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, id="SIGTERM"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, id="SIGKILL"),
        pytest.param("os.abort()", -signal.SIGABRT, id="SIGABRT"),
    ],
)
def test_exit(tmp_path: Path, code: str, status: int, how: str) -> None:
    (tmp_path / "job.py").write_text(f"import os, sys, signal\nprint('out', flush=True)\n{code}\n")
    plain = run((sys.executable, "job.py"), tmp_path)
    command = (sys.executable, "job.py") if how == "python" else ("job.py",)
    rank = {"RANK": "0", "WORLD_SIZE": "1"} if how == "rank" else {}
    probed = run((*PROBE, *command), tmp_path, environment(**rank))
    assert plain.returncode == probed.returncode == status
    assert probed.stdout.startswith(plain.stdout)
    assert plain.stderr in probed.stderr


SIGNALS = """
    import os, signal, sys, time
    got = []
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        signal.signal(getattr(signal, name), lambda number, frame: got.append(signal.Signals(number).name))
    print("ready", signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGPIPE), flush=True)
    limit = time.monotonic() + 20
    while not got and time.monotonic() < limit:
        time.sleep(0.05)
    time.sleep(0.5)
    print(got, flush=True)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_to_the_supervisor_arrives_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(SIGNALS))
    words = (*PROBE, "job.py")
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"ready set() {signal.getsignal(signal.SIGPIPE)}\n"
        process.send_signal(getattr(signal, name))
        assert process.stdout.readline() == f"['{name}']\n"
        process.stdout.read()
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_the_whole_group_arrives_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(SIGNALS))
    words = (*PROBE, "job.py")
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, getattr(signal, name))
        assert process.stdout.readline() == f"['{name}']\n"
        process.stdout.read()
        assert process.wait(timeout=30) == 0


def test_the_terminal_is_the_jobs(tmp_path: Path) -> None:
    """isatty on all three streams, and ^C reaches the job once."""
    (tmp_path / "job.py").write_text("import sys\nprint([s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr)])\n")
    (tmp_path / "job.py").open("a").write(textwrap.dedent(SIGNALS))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, [*PROBE, "job.py"], environment())
    text = b""
    interrupted = False
    limit = time.monotonic() + 40
    while time.monotonic() < limit:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                part = os.read(terminal, 4096)
            except OSError:
                break
            text += part
        if b"ready" in text and not interrupted:
            interrupted = True
            os.write(terminal, b"\x03")
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"[True, True, True]" in text
    assert b"['SIGINT']" in text


def test_standard_input_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys; print(sys.stdin.read()[::-1])\n")
    assert run((*PROBE, "job.py"), tmp_path, text_in="abc").stdout.startswith("cba\n")


def test_switched_off_nothing_is_ours(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, sys\n"
        "print(sys.argv, 'sitecustomize' in sys.modules, [k for k in os.environ if 'DDP_AUDIT_' in k])\n"
    )
    plain = run((sys.executable, "job.py", "x"), tmp_path, environment(DDP_AUDIT="0"))
    probed = run((*PROBE, "job.py", "x"), tmp_path, environment(DDP_AUDIT="0"))
    assert (probed.stdout, probed.stderr, probed.returncode) == (plain.stdout, plain.stderr, 0)
    assert os.listdir(tmp_path) == ["job.py"]


def test_a_failing_import_of_a_hooked_module_reads_as_ever(tmp_path: Path) -> None:
    """Traceback and warnings of a watched import hold no frame of ours."""
    (tmp_path / "torch.py").write_text("import warnings; warnings.warn('old', stacklevel=2)\nraise OSError('broken')\n")
    (tmp_path / "job.py").write_text("import torch\n")
    plain = run((sys.executable, "job.py"), tmp_path)
    probed = run((*PROBE, "job.py"), tmp_path)
    assert plain.returncode == probed.returncode == 1
    assert plain.stderr in probed.stderr
    assert "job.py:1: UserWarning: old" in plain.stderr


def test_the_loader_of_a_hooked_module_is_genuine(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "job.py").write_text(
        "import torch, importlib\n"
        "print(type(torch.__loader__), vars(torch.__loader__), torch.__spec__.loader is torch.__loader__)\n"
        "importlib.reload(torch)\n"
        "print(vars(torch.__loader__))\n"
    )
    plain = run((sys.executable, "job.py"), tmp_path)
    probed = run((*PROBE, "job.py"), tmp_path)
    assert plain.returncode == 0
    assert probed.stdout.startswith(plain.stdout)


def test_the_start_of_a_process_imports_next_to_nothing(tmp_path: Path) -> None:
    """Time cannot be held on a busy machine, the modules that a start loads can: ours."""
    code = (
        "import os, sys; before = set(sys.modules); sys.path.insert(0, sys.argv[1]); import sitecustomize; "
        "print(*sorted(set(sys.modules) - before))"
    )
    site = Path(__file__).resolve().parents[2] / "ddp_audit" / "boot" / "site"
    env = environment(_DDP_AUDIT_SETTINGS="{}", _DDP_AUDIT_OUT=str(tmp_path))
    env.pop("PYTHONPATH")
    done = run((sys.executable, "-S", "-c", code, str(site)), tmp_path, env)
    ours = {n for n in done.stdout.split() if n == "sitecustomize" or n.partition(".")[0] == "ddp_audit"}
    assert "ddp_audit.boot.process" in ours, done.stderr
    assert set(done.stdout.split()) - ours <= {"__future__"}
