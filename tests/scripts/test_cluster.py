"""How a run is launched: on this machine, on several, and by SLURM, which stand-ins play here."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lib.distributed.job_specs import batch_script, seconds_of
from lib.distributed.local_ranks import LOOPBACK
from lib.distributed.rendezvous import (
    Rendezvous,
    Route,
    check_shares,
    environment_of,
    rendezvous_of,
    route_to,
    torchrun_options,
)
from lib.errors import ConfigError, PlanError
from lib.kconf.project import given_overrides
from lib.runs.identity import identity
from scripts import cluster
from tests.support.configs import make_config
from tests.support.external import write_external
from tests.support.stubbed import printed_elsewhere

RUNNING, TAKEN = (f"JobState=RUNNING PreemptTime={time}" for time in ("None", "2026-11-22T00:46:56"))
THREE = Rendezvous(min_nodes=2, max_nodes=3, endpoint="here:29500")


def test_machines_are_counted() -> None:
    assert rendezvous_of(nodes="1", endpoint=None) is None
    assert rendezvous_of(nodes="2:3", endpoint="here:29500") == THREE and THREE.is_elastic
    fixed = rendezvous_of(nodes="4", endpoint="here:1")
    assert fixed is not None and (fixed.min_nodes, fixed.max_nodes, fixed.is_elastic) == (4, 4, False)


@pytest.mark.parametrize("nodes", ["", "0", "3:2", "two", "2:", ":2", "2:3:4", "-1"])
def test_no_number_of_machines_is_refused(nodes: str) -> None:
    with pytest.raises(ConfigError, match="is not a number of nodes"):
        rendezvous_of(nodes=nodes, endpoint="here:29500")


@pytest.mark.parametrize("endpoint", [None, "", "here", "here:", ":29500", "here:x", "here:65536"])
def test_no_place_to_meet_is_refused(endpoint: str | None) -> None:
    with pytest.raises(ConfigError, match="is not a rendezvous endpoint" if endpoint else "is not set"):
        rendezvous_of(nodes="2", endpoint=endpoint)


def test_every_number_of_machines_must_share_the_batch() -> None:
    check_shares(THREE, processes=4, target=64, unit=1)
    with pytest.raises(PlanError, match="300 cannot be split over 3 x 4"):
        check_shares(THREE, processes=4, target=300, unit=32)


def test_torchrun_is_told() -> None:
    options = torchrun_options(THREE, processes=4, restarts=3, name="x")
    assert {"--nnodes=2:3", "--max-restarts=3", "--rdzv-endpoint=here:29500", "--rdzv-id=x"} <= set(options)
    fixed = replace(THREE, max_nodes=2)
    assert "--nnodes=2" in torchrun_options(fixed, processes=4, restarts=3, name="x")


def test_torchrun_and_gloo_are_told_the_way_where_names_do_not() -> None:
    """test_machines.py has machines that need it."""
    route = Route(address="10.0.0.5", interface="eth7", is_host=True)
    options = torchrun_options(THREE, processes=1, restarts=0, name="x", route=route)
    assert "--local-addr=10.0.0.5" in options and any(",is_host=false" in option for option in options)
    variables = environment_of(route)
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == ("eth7", "=eth7")
    unsaid = replace(route, interface=None, is_host=None)
    options = torchrun_options(THREE, processes=1, restarts=0, name="x", route=unsaid)
    assert not any("is_host" in option for option in options)
    assert "GLOO_SOCKET_IFNAME" not in environment_of(unsaid) and "GLOO_SOCKET_IFNAME" not in environment_of(
        None
    )


def test_no_way_leads_to_nowhere() -> None:
    assert route_to("nowhere.invalid:29500") is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_what_meets_on_one_machine_stays_on_it(host: str) -> None:
    route = route_to(f"{host}:29500")
    assert route is not None and (route.address, route.serves, route.is_host) == ("127.0.0.1",) * 2 + (None,)
    assert environment_of(route)["GLOO_SOCKET_IFNAME"] == LOOPBACK


def test_the_command_is_printed() -> None:
    config = make_config("lenet5", device="cpu")
    runs = Path("runs")
    assert cluster.command_line(config, name="x", runs=runs) == "python -m train --runs runs train"
    two = config.replace(num_devices=2)
    shown = cluster.command_line(two, name="x", runs=runs)
    assert shown == "python -m train --runs runs train # starts 2 processes"
    many = two.replace(dist_nnodes="2", dist_endpoint="here:29500")
    shown = cluster.command_line(many, name="x", runs=runs)
    # Not `torchrun -m train`, of which each process would start all others again.
    assert shown.startswith("python -m train --runs runs train # starts torchrun --nnodes=2 ")
    assert "--rdzv-endpoint=here:29500" in shown


def test_the_command_trains_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables are those by which make has the configuration, EXTERNAL= and options."""
    monkeypatch.delenv("ANNEAL_EXTERNAL", raising=False)
    assert cluster.environment_of(Path(".config")) == {}
    external = write_external(tmp_path / "it's $mine")
    given = {"KCONFIG_MAKE_VARIABLES": "O CONFIG_RUN_NAME", "CONFIG_RUN_NAME": "a 'b' $c"}
    for name, value in {**given, "ANNEAL_EXTERNAL": str(external), "EXTERNAL_SHELL": "1"}.items():
        monkeypatch.setenv(name, value)
    wanted = cluster.environment_of(Path("out/.config"))
    assert wanted.pop("KCONFIG_MAKE_VARIABLES") == "CONFIG_RUN_NAME"
    file = {"KCONFIG_CONFIG": "out/.config", "CONFIG_RUN_NAME": "a 'b' $c"}
    assert wanted == {**file, "ANNEAL_EXTERNAL": str(external), "EXTERNAL_SHELL": "1"}
    config = make_config("lenet5", device="cpu")
    shown = cluster.command_line(config, name="x", runs=Path("runs"), environment=wanted)
    (tmp_path / "python").write_text('#!/bin/sh\necho "$*"; env\n')
    (tmp_path / "python").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command, *lines = subprocess.check_output(["sh", "-c", shown], env=path, text=True).splitlines()
    assert command == "-m train --runs runs train"
    assert {f"{name}={value}" for name, value in wanted.items()} <= {*lines}


@pytest.mark.parametrize("external", [True, False])
def test_a_job_has_the_plug_ins_of_the_make_that_wrote_it(
    external: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_external(tmp_path / "it's mine") if external else None
    monkeypatch.setenv("ANNEAL_EXTERNAL", str(folder or ""))
    text = cluster.script_of(make_config("lenet5"), configuration="", folder=tmp_path, runs=tmp_path)
    above = text.partition("export KCONFIG_CONFIG")[0].partition("END_OF_CONFIGURATION\nunset")[2]
    program = f'unset{above}printf %s "${{ANNEAL_EXTERNAL-none}}"'
    environment = {**os.environ, "ANNEAL_EXTERNAL": "/of/another/make"}
    assert subprocess.check_output(["bash", "-c", program], env=environment, text=True) == str(
        folder or "none"
    )


def test_a_login_node_without_gpus_prints_the_command_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(device="cuda", num_devices=8, dist_nnodes="2", dist_endpoint="here:29500")
    (line,) = printed_elsewhere(config, monkeypatch)
    assert " train # starts torchrun --nnodes=2 --nproc-per-node=8 " in line


def test_where_a_run_is_launched_is_no_part_of_what_it_is() -> None:
    values = {"MODEL": "lenet5", "DIST_ENDPOINT": "here:1", "DIST_STRATEGY": "auto", "SLURM_TIME": ""}
    assert identity(values) == identity(values | {"DIST_ENDPOINT": "there:1", "SLURM_TIME": "1:00:00"})
    assert identity(values) == identity(values | {"NUM_DEVICES": 7})
    assert identity(values) == identity(values | {"DIST_STRATEGY": "fsdp"})
    assert identity(values) != identity(values | {"MODEL": "resnet18"})


def asked_of_slurm(tmp_path: Path, **changes: object) -> str:
    """How many GPUs a machine, by the script that is written; "" where none are asked for."""
    config = make_config("lenet5").replace(**changes)  # type: ignore[arg-type]
    text = cluster.script_of(config, configuration="", folder=tmp_path, runs=tmp_path)
    return "".join(line.partition("--gpus-per-node=")[2] for line in text.splitlines())


@pytest.mark.parametrize(
    ("device", "used", "wanted", "requested"),
    [
        *(("cuda", 4, 0, "4"), ("cuda", 4, 8, "8"), ("cuda", 0, 8, "8"), ("auto", 4, 0, "4")),
        *(("auto", 0, 0, ""), ("cpu", 4, 0, ""), ("xla", 4, 0, "")),
    ],
)
def test_slurm_is_asked_for_the_gpus_that_are_used(
    device: str, used: int, wanted: int, requested: str, tmp_path: Path
) -> None:
    changes = {"device": device, "num_devices": used, "slurm_gpus_per_node": wanted}
    assert asked_of_slurm(tmp_path, **changes) == requested


@pytest.mark.parametrize(
    ("device", "used", "wanted", "message"),
    [
        ("cuda", 4, 2, "CONFIG_SLURM_GPUS_PER_NODE=2 is fewer than CONFIG_NUM_DEVICES=4"),
        ("cpu", 0, 2, "CONFIG_SLURM_GPUS_PER_NODE=2 is not for CONFIG_DEVICE_CPU=y"),
        ("tpu", 4, 4, "CONFIG_SLURM_GPUS_PER_NODE=4 is not for CONFIG_DEVICE_TPU=y"),
        ("cuda", 0, 0, "CONFIG_NUM_DEVICES=0 does not say how many GPUs"),
    ],
)
def test_gpus_that_contradict_the_devices_are_refused(
    device: str, used: int, wanted: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        asked_of_slurm(tmp_path, device=device, num_devices=used, slurm_gpus_per_node=wanted)


def script(tmp_path: Path, *, nodes: int = 1, gpus: int = 0, **changes: object) -> str:
    return batch_script(
        replace(make_config().launch, slurm_grace_seconds=120, **changes),  # type: ignore[arg-type]
        model="lenet5",
        nodes=nodes,
        gpus=gpus,
        root=tmp_path,
        python="python",
        configuration="CONFIG_MAX_STEPS=7\n",
        folder=tmp_path / "it's 50%",
        runs=tmp_path / "runs",
    )


def test_the_script_asks_for_what_is_set_and_no_more(tmp_path: Path) -> None:
    text = script(tmp_path)
    assert "--gpus-per-node" not in text and "--partition" not in text and "DIST_ENDPOINT" not in text
    assert "#SBATCH --requeue" in text and "#SBATCH --signal=B:USR1@120" in text
    text = script(tmp_path, nodes=2, gpus=8, slurm_time="1:00:00", slurm_partition="long")
    for line in ("--nodes=2", "--gpus-per-node=8", "--time=1:00:00", "--partition=long"):
        assert f"#SBATCH {line}\n" in text
    assert 'head -n 1):29500"' in text
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=6 python" in script(tmp_path, slurm_cpus_per_node=6)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("", None),
        ("UNLIMITED", None),
        ("3", 180),
        ("3:10", 190),
        ("1:00:05", 3605),
        ("1-2", 93600),
        ("1-2:30", 95400),
        ("1-00:00:01", 86401),
    ],
)
def test_times_are_read_as_sbatch_reads_them(time: str, seconds: int | None) -> None:
    assert seconds_of(time) == seconds


def test_a_time_that_is_up_before_it_begins_is_refused(tmp_path: Path) -> None:
    # A job that is told to stop at once would be requeued for ever.
    with pytest.raises(ConfigError, match="CONFIG_SLURM_TIME=3:00 leaves no time for training"):
        script(tmp_path, slurm_time="3:00")
    assert "--time=3:01" in script(tmp_path, slurm_time="3:01")


def run_script(
    tmp_path: Path, srun: str, *, state: str, job: str = RUNNING, nodes: int = 1
) -> tuple[int, str]:
    """Exit status, and what scontrol was called with, of a job whose srun does that.

    state: what training leaves in its run; job: what SLURM says of the job by then.
    """
    status = tmp_path / "runs" / "lenet5" / "1" / "status.json"
    status.parent.mkdir(parents=True)
    status.write_text('{"state": "preempted"}')  # by an attempt before this one
    commands = {
        "srun": f"""[ -z '{state}' ] || echo '{{"state": "{state}"}}' > {status}\n{srun}""",
        "scontrol": f"""case $2 in
            hostnames) echo node7;;
            job) echo 'JobId=7 {job} Restarts=0';;
            *) echo "$@" >> {tmp_path}/called;;
        esac""",
        # Training is over before it returns: the script must not take the signal for its status.
        "scancel": f'echo "$@" > {tmp_path}/signalled; /bin/sleep 0.5',
        "sleep": ":",
    }
    (tmp_path / "bin").mkdir()
    for name, body in commands.items():
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
    (tmp_path / "it's 50%").mkdir()
    of_make = {"KCONFIG_MAKE_VARIABLES": "CONFIG_MAX_STEPS", "CONFIG_MAX_STEPS": "9"}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script(tmp_path, nodes=nodes)],
        env={**os.environ, **of_make, "PATH": path, "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    called = tmp_path / "called"
    return done.returncode, called.read_text().strip() if called.exists() else ""


@pytest.mark.parametrize(
    ("status", "state", "job", "called"),
    [
        (0, "done", RUNNING, ""),
        (1, "failed", RUNNING, ""),
        (75, "preempted", RUNNING, "requeue 7"),
        (143, "preempted", RUNNING, "requeue 7"),
        (143, "", RUNNING, ""),  # the state is of an earlier attempt
        (143, "", TAKEN, "requeue 7"),
        (1, "", TAKEN, ""),  # an environment that is broken stays so
        (75, "preempted", "JobState=COMPLETING PreemptTime=None", ""),  # cancelled
    ],
)
def test_what_was_preempted_is_requeued_and_nothing_else(
    status: int, state: str, job: str, called: str, tmp_path: Path
) -> None:
    assert run_script(tmp_path, f"exit {status}", state=state, job=job) == (status, called)


@pytest.mark.slow
@pytest.mark.parametrize(("status", "state"), [(75, "preempted"), (143, "")])
def test_a_signal_of_slurm_reaches_training_and_not_srun(status: int, state: str, tmp_path: Path) -> None:
    signalled = tmp_path / "signalled"
    waits = f"for i in $(seq 300); do [ -e {signalled} ] && exit {status}; /bin/sleep 0.1; done; exit 3"
    srun = f"trap 'exit 137' TERM; kill -USR1 $PPID; {waits}"
    assert run_script(tmp_path, srun, state=state) == (status, "requeue 7")
    assert signalled.read_text() == "--signal=TERM 7\n"


def seen_by_training(tmp_path: Path, nodes: int) -> dict[str, str]:
    assert run_script(tmp_path, f"env > {tmp_path}/seen", state="done", nodes=nodes) == (0, "")
    lines = (tmp_path / "seen").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_what_was_asked_is_trained_whatever_is_in_the_environment(tmp_path: Path) -> None:
    seen = seen_by_training(tmp_path, nodes=1)
    assert given_overrides(seen) == {} and "CONFIG_MAX_STEPS" not in seen
    assert Path(seen["KCONFIG_CONFIG"]).read_text() == "CONFIG_MAX_STEPS=7\n"


def test_the_first_machine_is_where_all_meet(tmp_path: Path) -> None:
    assert given_overrides(seen_by_training(tmp_path, nodes=2)) == {"CONFIG_DIST_ENDPOINT": "node7:29500"}


def test_without_slurm_nothing_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="there is no sbatch here"):
        cluster.submit(tmp_path / "run.sbatch")
