"""``ddp-audit probe``: run a training job under observation."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

import ddp_audit
from ddp_audit.boot import command as commands
from ddp_audit.boot import folder as folders
from ddp_audit.boot import process, supervise
from ddp_audit.boot.command import Plan
from ddp_audit.cli import exit_codes, zero
from ddp_audit.cli.follow import FolderFollower, complete_mesh
from ddp_audit.settings import OFF, VARIABLE, Settings, SettingsError, from_environment, parse_mesh

FIRST_REPORT_AFTER = 600.0  # seconds; an endless job has a report after this, others after their first epoch
STOP_GRACE = 30.0  # seconds between the first rank that stopped and the end of those that did not
KILL_GRACE = 5.0  # seconds between SIGTERM and SIGKILL for them
LIFE_SIGN = 5.0  # seconds between two; a twelfth of what counts as dead
CHECK_ID = re.compile(r"^(DDP)?\d{3}$", re.IGNORECASE)


class ProbeCommand(click.Command):
    """Options end at the first word that is none of ours: the job's own are never looked at."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``--`` before ``-m``, which begins the job's command and is no option of ours."""
        takes_value = {
            name: not (param.is_flag or param.count)
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in (*param.opts, *param.secondary_opts)
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            if args[at] == "-m":
                args = [*args[:at], "--", *args[at:]]
                break
            at += 2 if takes_value.get(args[at]) else 1
        return super().parse_args(ctx, args)


def _mesh(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[tuple[str, int], ...]:
    if value is None:
        return ()
    try:
        return parse_mesh(value)
    except SettingsError as error:
        raise click.UsageError(str(error)) from error


def _require(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    for one in value:
        if not CHECK_ID.match(one) and not re.fullmatch(r"[a-z]+(-[a-z]+)+", one):
            raise click.UsageError(f"--require: '{one}' is no check; 'ddp-audit checks' lists them")
    return tuple(f"DDP{one[-3:]}" if CHECK_ID.match(one) else one for one in value)


@click.command(
    name="probe",
    cls=ProbeCommand,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": False,
        "auto_envvar_prefix": "DDP_AUDIT",
        "max_content_width": 100,
    },
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder for evidence and reports; earlier evidence in it is moved to DIR/previous/. "
    "[default: ddp-audit-out/<start time>]",
)
@click.option("--steps", metavar="N", type=click.IntRange(min=1), help="End the job after N optimizer steps.")
@click.option(
    "--every",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Take costly signals (content, gradients, parameters) only at steps divisible by N.",
)
@click.option(
    "--collector",
    type=click.Choice(["auto", "store", "gloo", "nccl", "none"]),
    default="auto",
    show_default=True,
    help="How evidence of other nodes comes to rank 0.",
)
@click.option(
    "--mesh",
    metavar="NAME=SIZE,...",
    callback=_mesh,
    help="Layout of the ranks, outermost axis first, where it cannot be found by use: pp=2,dp=4,tp=2.",
)
@click.option("--dp-size", metavar="N", type=click.IntRange(min=1), help="Short for --mesh dp=N,mp=<rest>.")
@click.option(
    "--fail-on",
    type=click.Choice(exit_codes.FAIL_ON),
    default="never",
    show_default=True,
    help="Lowest severity that exits 1, when the job itself exits 0. Not inside a rank.",
)
@click.option("--allow-inconclusive", is_flag=True, help="With --fail-on: exit 0 where a core question is open, not 3.")
@click.option("--require", metavar="ID", multiple=True, callback=_require, help="Make a check a core question.")
@click.option("--abort-on", type=click.Choice(["error"]), help="End the job once an error is proven.")
@click.option(
    "--deadline",
    metavar="SECONDS",
    type=click.FloatRange(min=0.0, max=3600.0),
    default=10.0,
    show_default=True,
    help="Longest time that any wait of the probe may take.",
)
@click.option(
    "--disk-cap",
    metavar="MB",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Disk space per rank; beyond it the sample lists of the first and the newest epochs are kept.",
)
@click.option("--no-live", is_flag=True, help="Say nothing while the job runs.")
@click.pass_context
def command(
    ctx: click.Context,
    command: tuple[str, ...],
    out: Path | None,
    steps: int | None,
    every: int,
    collector: str,
    mesh: tuple[tuple[str, int], ...],
    dp_size: int | None,
    fail_on: str,
    allow_inconclusive: bool,
    require: tuple[str, ...],
    abort_on: str | None,
    deadline: float,
    disk_cap: int,
    no_live: bool,
) -> None:
    """Run a training job, unchanged, and say whether its ranks do different work.

    COMMAND is the command that starts the job, or a script to be run under torchrun:

    \b
      ddp-audit probe torchrun --nproc-per-node=2 train.py --lr 0.1
      ddp-audit probe accelerate launch train.py
      ddp-audit probe python train.py
      ddp-audit probe --steps 50 --fail-on error ./launch.sh

    \b
    Inside the ranks (rank 0 shows the verdict, the exit code is the job's):
      torchrun --nproc-per-node=2 --no-python ddp-audit probe train.py --lr 0.1
      torchrun --nproc-per-node=2 --no-python ddp-audit probe -m pkg.train
      torchrun --nproc-per-node=2 -m ddp_audit probe train.py

    \b
    The exit code is the job's own when that is not 0, else 0, or with --fail-on:
    1 a finding, 3 a core question without an answer. 2 is bad usage, 4 a bug in ddp-audit.

    Each option can also come from a variable: DDP_AUDIT_OUT, DDP_AUDIT_STEPS and so on.
    DDP_AUDIT=0 runs COMMAND as if ddp-audit were not there.
    """
    if not command:
        raise click.UsageError("no command given; for instance: ddp-audit probe torchrun --nproc-per-node=2 train.py")
    as_module = os.path.basename(sys.argv[0]) == "__main__.py"
    try:
        plan = commands.plan(command, os.environ, sys.argv[0], as_module)
    except commands.CommandError as error:
        raise click.UsageError(str(error)) from error
    if os.environ.get(OFF) == "0" or from_environment() is not None:
        _plain(plan)  # switched off, or a probe is around us already and sees what this one would
    if plan.form == "rank" and fail_on != "never" and _from_command_line(ctx, "fail_on"):
        raise click.UsageError(
            "--fail-on cannot gate inside a rank, torchrun would change the code; run 'ddp-audit report "
            f"{out or 'ddp-audit-out/latest'} --fail-on {fail_on}' after it"
        )
    options = Settings(
        out="",
        run_id="",
        form=plan.form,
        steps=steps,
        every=every,
        collector=collector,
        mesh=mesh or _dp_mesh(dp_size, plan),
        abort_on=abort_on,
        deadline=deadline,
        live=not no_live,
        cap_bytes=disk_cap << 20,
        python=sys.executable,
    )
    settings = _open(out, plan, options, require)
    if settings is None:
        _plain(plan)
    elif plan.form == "rank":
        _become(plan, settings)
    else:
        ctx.exit(_supervise(plan, settings, fail_on, allow_inconclusive))


def _from_command_line(ctx: click.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source in (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)


def _dp_mesh(dp_size: int | None, plan: Plan) -> tuple[tuple[str, int], ...]:
    """``dp=N,mp=rest``; where the number of ranks is not known yet the rest is left to the judge as ``mp=0``.

    Raises:
        click.UsageError: N does not divide the number of ranks.
    """
    if dp_size is None:
        return ()
    named = commands.rank_of(os.environ) if plan.form == "rank" else None
    ranks = named[1] if named else plan.launcher_ranks
    if ranks is None:
        return (("dp", dp_size), ("mp", 0))
    if ranks % dp_size:
        raise click.UsageError(f"--dp-size {dp_size} does not divide {ranks} ranks")
    return (("dp", dp_size), ("mp", ranks // dp_size))


def _plain(plan: Plan) -> None:
    """Run the command without any probe; comes back only by an error."""
    try:
        supervise.become(plan.executable, plan.argv, os.environ)
    except supervise.StartError as error:
        raise click.UsageError(str(error.strerror)) from error


def _open(out: Path | None, plan: Plan, options: Settings, require: tuple[str, ...]) -> Settings | None:
    """Settings with folder and run id; ``None`` when no folder can be had, which is said in one line."""
    ranked = commands.rank_of(os.environ)
    if plan.form == "rank":
        run_id, start, shared = folders.launch_identity(os.environ)
        ranks = ranked[1] if ranked else None
    else:
        start, ranks = time.time(), plan.launcher_ranks
        shared = plan.num_nodes > 1 and bool(plan.job_key or os.environ.get("SLURM_JOB_ID"))
        job = os.environ.get("SLURM_JOB_ID", "")
        run_id = folders.job_digest(plan.job_key, job) if shared else folders.new_run_id()
    run = {
        "run_id": run_id,
        "form": plan.form,
        "tool_version": ddp_audit.__version__,
        "start": start,
        "mesh": options.mesh,
        "every": options.every,
        "steps": options.steps,
        "collector": options.collector,
        "require": require,
        "launcher_ranks": ranks,
        "zero_reason": None,
        "script": plan.script,
    }
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and plan.form == "rank"
    try:
        folder = folders.open_folder(out, run_id=run_id, start=start, shared=shared, run=run, restarted=restarted)
    except folders.FolderError as error:
        if ranked is None or plan.form == "supervise" or os.environ.get("LOCAL_RANK", str(ranked[0])) == "0":
            click.echo(f"ddp-audit: the job runs unprobed, no output folder can be written: {error}", err=True)
        return None
    return replace(options, out=str(folder), run_id=run_id)


def probed_environment(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The environment of a probed job."""
    env = dict(environ)
    site = str(Path(process.__file__).resolve().parent / "site")
    # Nothing is appended where there was nothing: an empty part of PYTHONPATH is the working folder.
    env["PYTHONPATH"] = os.pathsep.join([site, env["PYTHONPATH"]] if env.get("PYTHONPATH") else [site])
    env[VARIABLE] = settings.to_json()
    env[process.OUT_VARIABLE] = settings.out
    env.pop(process.LEADER_VARIABLE, None)
    return env


def _become(plan: Plan, settings: Settings) -> None:
    env = probed_environment(os.environ, settings)
    ranked = commands.rank_of(os.environ)
    if ranked is not None and ranked[0] == 0:
        env[process.LEADER_VARIABLE] = str(os.getpid())
    try:
        supervise.become(plan.executable, plan.argv, env)
    except supervise.StartError as error:
        raise click.UsageError(str(error.strerror)) from error


# --------------------------------------------------------------------------- supervising


@dataclass(slots=True)
class Supervisor:
    """What is looked after while the child runs. ``tick`` is called a few times per second."""

    plan: Plan
    settings: Settings
    started: float = field(default_factory=time.monotonic)
    journals: FolderFollower = field(init=False)
    seen: zero.Seen = field(default_factory=zero.Seen)
    child: int = 0
    mine: dict[int, int] = field(default_factory=dict)  # pid -> rank, of processes below our child
    reports: list[str] = field(default_factory=list)  # why one was started
    reporter: subprocess.Popen[bytes] | None = None
    stopped: float | None = None  # when the first rank left at --steps or --abort-on
    ended: dict[int, float] = field(default_factory=dict)  # pid -> when it got SIGTERM
    last_sign: float = 0.0

    def __post_init__(self) -> None:
        self.journals = FolderFollower(self.settings.journal_folder)

    def tick(self, child: int) -> None:
        """Never raises: the child must not die of our care."""
        self.child = child
        try:
            self._tick()
        except Exception:
            return

    def _tick(self) -> None:
        now = time.monotonic()
        for one in self.journals.look():
            if supervise.descends(one.pid, self.child):
                self.mine[one.pid] = one.rank
        if not self.journals.journals and (now - self.started < 60 or int(now) % 10 == 0):
            zero.look(self.child, self.seen)
        if now - self.last_sign > LIFE_SIGN:
            self.last_sign = now
            folders.sign_of_life(Path(self.settings.out))
        self._follow(now)
        if now - self.started > FIRST_REPORT_AFTER and self.journals.journals:
            self._report("time")
        if self.reporter is not None and self.reporter.poll() is not None:
            self.reporter = None
        if self.stopped is not None and now - self.stopped > STOP_GRACE:
            self._end_the_late(now)

    def _follow(self, now: float) -> None:
        lowest = min((one.rank for one in self.journals.journals.values()), default=-1)
        for one in self.journals.journals.values():
            if one.rank != lowest and self.settings.steps is None and self.settings.abort_on is None:
                continue  # only the stop must be seen of all
            for event in one.events():
                if event.get("event") == "iteration_end" and event.get("finished") and one.rank == lowest:
                    self._report("epoch")
                elif event.get("event") == "stopped" and self.stopped is None:
                    self.stopped = now

    def _report(self, why: str) -> None:
        """A first report beside the job, silent and at low priority; at most one per reason."""
        if why in self.reports or self.reporter is not None:
            return
        self.reports.append(why)
        root = str(Path(ddp_audit.__file__).resolve().parents[1])
        code = "import sys; sys.path.append(sys.argv[1]); from ddp_audit.cli.finish import main; main(sys.argv[2:])"
        self.reporter = subprocess.Popen(
            [sys.executable, "-P", "-c", code, root, self.settings.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _end_the_late(self, now: float) -> None:
        for pid in list(self.mine):
            if not supervise.alive(pid):
                continue
            if pid in self.ended and now - self.ended[pid] > KILL_GRACE:
                number = signal.SIGKILL
            elif pid not in self.ended and supervise.descends(pid, self.child):
                number = signal.SIGTERM
                self.ended[pid] = now
            else:
                continue
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """After the child: end the report under way, wait for ranks that are still leaving."""
        if self.reporter is not None:
            self.reporter.kill()
            self.reporter.wait()
        limit = time.monotonic() + self.settings.deadline
        while time.monotonic() < limit:
            self.journals.look()
            pids = [one.pid for one in self.journals.journals.values() if belongs(one.pid, self.settings.run_id)]
            if not pids:
                return
            time.sleep(0.05)


def belongs(pid: int, run_id: str) -> bool:
    """Whether a living process of this host was started under this run's settings."""
    try:
        return supervise.alive(pid) and run_id.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _supervise(plan: Plan, settings: Settings, fail_on: str, allow_inconclusive: bool) -> int:
    supervisor = Supervisor(plan=plan, settings=settings)
    env = probed_environment(os.environ, settings)
    try:
        code = supervise.run_child(plan.executable, plan.argv, env, supervisor.tick)
    except supervise.StartError as error:
        raise click.UsageError(str(error.strerror)) from error
    try:
        gate = _conclude(supervisor, fail_on, allow_inconclusive)
    except KeyboardInterrupt:
        click.echo(f"ddp-audit: interrupted; 'ddp-audit report {settings.out}' shows what was recorded", err=True)
        gate = exit_codes.OK
    except Exception as error:
        if code == 0:
            raise
        click.echo(f"ddp-audit: {type(error).__name__} while judging; the evidence is in {settings.out}", err=True)
        gate = exit_codes.OK
    if code < 0 and not supervisor.ended:
        supervise.die_by(-code)
        return 128 - code
    return gate if code == 0 or supervisor.ended else code


def _conclude(supervisor: Supervisor, fail_on: str, allow_inconclusive: bool) -> int:
    """Report, and give the gate's code."""
    from ddp_audit.cli.finish import finish

    plan, settings = supervisor.plan, supervisor.settings
    out = Path(settings.out)
    supervisor.close()
    elsewhere = _reported_elsewhere(supervisor)
    if elsewhere is not None:
        click.echo(f"ddp-audit: {elsewhere}", err=True)
        folders.mark_ended(out, settings.run_id)
        return exit_codes.OK
    reason = None
    if not supervisor.journals.journals:
        reason = zero.why_no_rank(
            out,
            launcher=plan.launcher,
            child=supervisor.child,
            seen=supervisor.seen,
            asked=plan.launcher_ranks,
        )
        folders.update_run(out, zero_reason=reason)
    complete_mesh(out, supervisor.journals)
    audit = finish(out, settings, print_text=True)
    if reason is not None and audit is None:
        click.echo(f"ddp-audit: no rank was seen: {reason}", err=True)
    folders.mark_ended(out, settings.run_id)
    if fail_on == "never":
        return exit_codes.OK
    if reason is not None:
        return exit_codes.OK if allow_inconclusive else exit_codes.INCONCLUSIVE
    if audit is None:
        return exit_codes.INTERNAL_ERROR
    return exit_codes.exit_code(audit, fail_on, allow_inconclusive)


def _reported_elsewhere(supervisor: Supervisor) -> str | None:
    """On a node that is not the first: where the verdict is shown; ``None`` when it is shown here.

    The ranks of other nodes write into the first node's folder, or send their journals to it. Its
    supervisor is the one whose child holds rank 0.
    """
    if supervisor.plan.num_nodes < 2:
        return None
    settings = supervisor.settings
    moved = _moved(Path(settings.out))
    if 0 in supervisor.mine.values():
        return None
    if moved is None:
        ranks = {one.rank for one in supervisor.journals.journals.values()}
        if 0 in ranks and supervisor.mine:  # a folder that both nodes see; rank 0 is the other node's
            moved = settings.out
        else:
            return None  # no rank was seen here, or none was seen alive: better twice than never
    if moved:
        return f"the verdict over all nodes is shown on the first node and lies in {moved}"
    return (
        "the verdict over all nodes is shown on the first node; should ranks of this node be missing there: "
        f"ddp-audit report FIRST_NODE_DIR {settings.out} -o report.html"
    )


def _moved(out: Path) -> str | None:
    """Folder of the first node, "" when the journals were sent there, ``None`` when nothing says."""
    import json

    try:
        value: Any = json.loads((out / "moved.json").read_text())
    except (OSError, ValueError):
        return None
    return str(value.get("folder") or "") if isinstance(value, dict) else None
