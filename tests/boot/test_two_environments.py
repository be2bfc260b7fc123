"""ddp-audit in one virtual environment, the job in another."""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path

import pytest
from launching import PROBE, environment, run

CHECK = """
import importlib.util, sys
assert sys.prefix == PREFIX, sys.prefix
for name in ("click", "rich", "jinja2"):
    assert importlib.util.find_spec(name) is None, name
    assert name not in sys.modules
import ddp_audit
assert ddp_audit.__file__.startswith(ROOT), ddp_audit.__file__
from ddp_audit import settings
assert settings.from_environment().python == OURS
assert ROOT not in sys.path and not any(p.startswith(ROOT + "/ddp_audit") for p in sys.path)
print("as it should be", sys.argv)
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second environment without ddp-audit and without what only ddp-audit brings."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    return folder


@pytest.mark.parametrize("how", ["by its python", "activated", "by its python in a rank"])
def test_only_ddp_audit_is_importable(tmp_path: Path, other: Path, how: str) -> None:
    root = str(Path(__file__).resolve().parents[2])
    head = f"PREFIX, ROOT, OURS = {str(other)!r}, {root!r}, {sys.executable!r}\n"
    (tmp_path / "job.py").write_text(head + CHECK)
    env = environment()
    ranked = {"RANK": "0", "WORLD_SIZE": "1"} if how.endswith("rank") else {}
    # What makes ddp_audit importable for us must not make it importable there.
    launcher = (sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); sys.argv[0] = '/nowhere/ddp-audit'; "
                "from ddp_audit.cli.main import main; main()", *PROBE[3:])  # fmt: skip
    env.pop("PYTHONPATH")
    if how == "activated":
        done = run((*launcher, "job.py", "x"), tmp_path, {**env, "VIRTUAL_ENV": str(other)})
    else:
        done = run((*launcher, str(other / "bin" / "python"), "job.py", "x"), tmp_path, {**env, **ranked})
    assert done.returncode == 0, done.stderr
    assert "as it should be ['job.py', 'x']" in done.stdout


@pytest.mark.distributed
def test_a_training_job_there_is_seen(tmp_path: Path, other: Path) -> None:
    """torch comes by a .pth to the tests' site-packages, in which an editable ddp-audit may be: it is hidden."""
    pytest.importorskip("ddp_audit.hooks.state")
    packages = next(p for p in site.getsitepackages() if (Path(p) / "torch").is_dir())
    mine = other / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    shown = mine / "borrowed"
    shown.mkdir(exist_ok=True)
    for entry in Path(packages).iterdir():
        if not entry.name.lower().startswith(("ddp_audit", "__editable__", "click", "rich", "jinja2")):
            link = shown / entry.name
            if not link.exists() and not entry.name.endswith(".pth"):
                link.symlink_to(entry)
    (mine / "borrowed.pth").write_text(f"{shown}\n")
    (tmp_path / "job.py").write_text(
        "import torch, importlib.util\n"
        "assert importlib.util.find_spec('click') is None\n"
        "model = torch.nn.Linear(2, 1); o = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(4, 2)).sum().backward(); o.step(); o.zero_grad()\n"
        "print('trained')\n"
    )
    done = run((*PROBE, "--out", "o", str(other / "bin" / "python"), "job.py"), tmp_path)
    (mine / "borrowed.pth").unlink()
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert len(list((tmp_path / "o" / "journal").glob("rank00000-*.journal"))) == 1, done.stderr
