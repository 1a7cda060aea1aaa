"""Launching: what is rendered, and what a job does when it goes well and when it does not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rlcore.cli import main
from rlcore.quoting import quoted
from rlcore.types import Cluster, NodePlan
from rlcore_launchers import node
from rlcore_launchers.inline import Inline
from rlcore_launchers.ray import RayJob
from rlcore_launchers.slurm import Slurm


def two_nodes(*driver: str, within: int = 60, **env: str) -> Cluster:
    given = {"SHARED": "a b", **env}
    plans = (NodePlan((0,), "head", {**given, "TOKEN": "${TOKEN}"}, ()), NodePlan((1,), "worker", given, ()))
    return Cluster(2, 0, plans, {}, driver, ports={"ray": 26379})


def script(cluster: Cluster, **options: Any) -> str:
    config = Slurm.Config(**{"python": sys.executable, "fabric_prefix": "10.77.", "join_seconds": 20, **options})
    return Slurm(config).render(None, cluster)  # type: ignore[arg-type]


# --- what is rendered


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"image": "/images/a b.sqsh", "mounts": ("/models:/models", "/scratch:/scratch")},
        {"partition": "gpu", "account": "me", "options": ("--qos=high", '--comment=it\'s "mine" $HOME')},
        {"setup": ("module load cuda",), "workdir": "/work dir"},
        {"fabric_prefix": None},
    ],
)
def test_the_script_is_clean(tmp_path: Path, options: dict[str, Any]) -> None:
    if shutil.which("shellcheck") is None:
        pytest.fail("shellcheck is missing: apt-get install shellcheck")
    path = tmp_path / "job.sh"
    path.write_text(
        script(two_nodes("rlcore", "train", "--set", 'agent.system_prompt=it\'s $HOME `id` "x"'), **options)
    )
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "word",
    ["", "a b", "it's", '"quoted"', "$HOME", "`id`", "$(id)", "a\nb", "!", "*", "\\", "ü", '${HOME}! and $x `y` "z"'],
)
def test_words_survive_a_shell(word: str) -> None:
    """Everything is literal but references in braces."""
    done = subprocess.run(
        ["bash", "-c", f"printf %s {quoted([word])}"], capture_output=True, text=True, check=True, env={"HOME": "/me"}
    )
    assert done.stdout == word.replace("${HOME}", "/me")


def test_credentials_stay_with_the_driver() -> None:
    text = script(two_nodes("true"))
    assert "env -u TOKEN" in text
    assert "TOKEN=" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": ("qos",)}, "no option"),
        ({"job_name": "a\nb"}, "one line"),
        ({"fabric_prefix": "10.$(id)"}, "match"),
    ],
)
def test_options_that_would_break_the_script_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slurm.Config(**options)


def test_inline_gives_the_exit_status_of_the_driver() -> None:
    inline = Inline(Inline.Config())
    cluster = Cluster(1, 0, (), {}, (sys.executable, "-c", "raise SystemExit(7)"))
    assert inline.launch(None, cluster) == 7  # type: ignore[arg-type]
    assert inline.render(None, cluster).startswith(sys.executable)  # type: ignore[arg-type]


def test_a_ray_job_carries_no_variables() -> None:
    made = RayJob(RayJob.Config(address="http://head:8265", follow=False))
    line = made.render(None, two_nodes("rlcore", "train", "--set", "a b"))  # type: ignore[arg-type]
    assert line == "ray job submit --address=http://head:8265 --no-wait -- rlcore train --set 'a b'\n"


# --- the command


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["launch", *words])
    return int(ended.value.code or 0)


def test_the_command_renders_without_anything_there(capsys: Any, tmp_path: Path) -> None:
    assert command("glm52", "--launcher", "slurm", "--nodes", "12", "--set", "launcher.partition=gpu") == 0
    out = capsys.readouterr().out
    assert "#SBATCH --nodes=12" in out
    assert "#SBATCH --partition=gpu" in out
    assert "rlcore train glm52" in out
    assert command("glm52", "--launcher", "slurm", "-o", str(tmp_path / "job.sh")) == 0
    assert (tmp_path / "job.sh").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=rlcore\n#SBATCH --nodes=16\n")


def test_the_driver_is_told_what_was_said_on_the_line(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[rollout]\nin_flight = 192\n")
    assert command("-p", "glm52", "--config", str(tmp_path / "mine.toml"), "--set", "trainer.lr=2e-6") == 0
    out = capsys.readouterr().out
    wanted = f"rlcore train --plugin glm52 glm52 --config {tmp_path}/mine.toml --set trainer.lr=2e-6 --set launcher.name=inline"
    assert out.strip() == wanted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--launcher", "slrm"], "did you mean 'slurm'"),
        (["--launcher", "slurm", "--set", "launcher.partiton=x"], "did you mean 'partition'"),
        (["--nodes", "8"], "leave none to serve"),
    ],
)
def test_mistakes_are_named(capsys: Any, words: list[str], message: str) -> None:
    assert command("glm52", *words) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_submitted_that_a_preflight_refuses(
    capsys: Any, slurm: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{slurm.bin}:/usr/bin:/bin:/usr/sbin")
    monkeypatch.delenv("DAYTONA_API_KEY", raising=False)
    assert command("glm52", "--launcher", "slurm", "--submit") == 2
    err = capsys.readouterr().err
    assert "DAYTONA_API_KEY" in err
    assert "nvidia-smi" not in err, "the login node needs no GPU"
    assert not (tmp_path / "submitted").exists()


@pytest.mark.parametrize("status", [0, 1])
def test_a_script_is_submitted_as_it_was_rendered(slurm: Any, monkeypatch: Any, tmp_path: Path, status: int) -> None:
    monkeypatch.setenv("PATH", f"{slurm.bin}:/usr/bin:/bin")
    monkeypatch.setenv("SBATCH_STATUS", str(status))
    made = Slurm(Slurm.Config())
    assert made.launch(None, two_nodes("true")) == status  # type: ignore[arg-type]
    assert (tmp_path / "submitted").read_text() == made.render(None, two_nodes("true"))  # type: ignore[arg-type]


# --- a job on two nodes


def test_a_wrong_prefix_fails_at_once_with_prefix_and_node(slurm: Any) -> None:
    began = time.monotonic()
    done = slurm.run(script(two_nodes("true"), fabric_prefix="10.99."), timeout=30)
    assert time.monotonic() - began < 30
    assert done.returncode == 3
    assert "no address of the head node n0 begins with '10.99.'" in done.stderr
    assert "10.77.0.1" in done.stderr


def test_an_empty_prefix_is_refused_and_the_one_of_the_job_is_taken(slurm: Any) -> None:
    text = script(two_nodes("true"), fabric_prefix=None)
    done = slurm.run(text, timeout=30, FABRIC_PREFIX="")
    assert done.returncode == 3
    assert "FABRIC_PREFIX is empty" in done.stderr
    assert "begins with '192.'" in slurm.run(text, timeout=30, FABRIC_PREFIX="192.").stderr


def test_another_number_of_nodes_is_refused(slurm: Any) -> None:
    done = slurm.run(script(Cluster(3, 0, (), {}, ("true",))), timeout=30)
    assert done.returncode == 3
    assert "the job has 2 nodes, the run needs 3" in done.stderr


FAKE_RAY = """#!/bin/bash
# ray start --head|--address=… --port=… --node-ip-address=… --block: listens, and notes that it was here
for word in "$@"; do
  case $word in --port=*) port=${word#--port=};; --node-ip-address=*) own=${word#--node-ip-address=};; esac
done
env > "$NOTES/env-$own"
echo "$@" > "$NOTES/ray-$own"
if [ -n "$port" ]; then exec PYTHON -c "
import socket, time
s = socket.create_server(('$own', $port))
while True: s.accept()[0].close()"; fi
sleep 1000
"""


@pytest.fixture
def fake_ray(slurm: Any, tmp_path: Path, monkeypatch: Any) -> Path:
    """A ``ray`` that only listens; ``ray.nodes()`` is what notes say."""
    notes = tmp_path / "notes"
    notes.mkdir()
    (slurm.bin / "ray").write_text(FAKE_RAY.replace("PYTHON", sys.executable))
    (slurm.bin / "ray").chmod(0o755)
    module = tmp_path / "modules" / "ray"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text(
        "import json, os, pathlib, re\n"
        "def init(**_): pass\n"
        "def nodes():\n"
        "    lines = [p.read_text() for p in pathlib.Path(os.environ['NOTES']).glob('ray-*')]\n"
        "    return [{'Alive': True, 'Resources': json.loads(re.search(r'--resources=(\\{.*?\\})', l)[1])} for l in lines]\n"
    )
    monkeypatch.setenv("NOTES", str(notes))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    return notes


@pytest.mark.parametrize("status", [0, 7])
def test_the_driver_starts_when_all_nodes_are_there_and_its_status_is_the_jobs(
    slurm: Any, fake_ray: Path, status: int
) -> None:
    code = f"import os, sys; print(os.environ['RAY_ADDRESS'], os.environ['TOKEN'], sys.argv[1]); sys.exit({status})"
    done = slurm.run(script(two_nodes(sys.executable, "-c", code, "it's $HOME")), timeout=90, TOKEN="secret")
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-1] == "10.77.0.1:26379 secret it's $HOME"
    head, worker = ((fake_ray / f"env-10.77.0.{host}").read_text().splitlines() for host in (1, 2))
    assert "TOKEN=secret" in head
    assert not any(line.startswith("TOKEN") for line in worker)
    assert "SHARED=a b" in worker
    assert f"NCCL_SOCKET_IFNAME={slurm.prefix}b" in worker
    assert not pids(slurm)


def test_a_missing_node_is_named_within_the_bound(slurm: Any, fake_ray: Path) -> None:
    began = time.monotonic()
    done = slurm.run(script(two_nodes("true"), join_seconds=6), timeout=60, down="n1")
    assert time.monotonic() - began < 45
    assert done.returncode == node.INCOMPLETE
    assert "1 of 2 nodes did not join Ray within 6 s: n1" in done.stderr


def test_a_worker_that_cannot_reach_the_head_says_so(slurm: Any, fake_ray: Path) -> None:
    name = f"{slurm.prefix}-n1"
    subprocess.run(["ip", "-n", name, "link", "set", f"{slurm.prefix}b", "down"], check=True)
    done = slurm.run(script(two_nodes("true"), join_seconds=6), timeout=60)
    assert done.returncode == node.INCOMPLETE
    assert "node n1" in done.stderr
    assert "cannot reach the head 10.77.0.1:26379" in done.stderr or "no address of node n1" in done.stderr


def test_a_signal_ends_everything(slurm: Any, fake_ray: Path, tmp_path: Path) -> None:
    path = tmp_path / "bin" / "job.sh"
    path.write_text(script(two_nodes("sleep", "1000")))
    environment = {**os.environ, "PATH": f"{slurm.bin}:{os.environ['PATH']}", "PREFIX": slurm.prefix, "DOWN": "",
                   "SLURM_JOB_NODELIST": "n[0-1]"}  # fmt: skip
    with subprocess.Popen(["bash", str(path)], env=environment, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stderr is not None
            for line in child.stderr:
                if "all 2 nodes are there" in line:
                    break
            for pid in pids(slurm):
                with contextlib.suppress(OSError):  # short-lived ones of the script's own
                    if "drive" in Path(f"/proc/{pid}/cmdline").read_text():
                        os.kill(int(pid), signal.SIGTERM)  # as Slurm signals the step
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=40) != 0
        finally:
            child.kill()  # nothing, where it has ended
    for _ in range(50):
        if not pids(slurm):
            break
        time.sleep(0.1)
    assert not pids(slurm)


def pids(slurm: Any) -> list[str]:
    found = []
    for name in slurm.nodes:
        line = ["ip", "netns", "pids", f"{slurm.prefix}-{name}"]
        found += subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()
    return found


def test_a_head_without_ray_ends_the_job_at_once(slurm: Any, fake_ray: Path) -> None:
    (slurm.bin / "ray").write_text("#!/bin/sh\nexit 9\n")
    began = time.monotonic()
    done = slurm.run(script(two_nodes("true"), join_seconds=200), timeout=60)
    assert done.returncode == 3
    assert "Ray on the head node n0 ended (status 9) before the driver" in done.stderr
    assert time.monotonic() - began < 60
    assert not pids(slurm)


@pytest.mark.slow
def test_a_real_ray_cluster_on_two_nodes_runs_the_driver(slurm: Any, ray_python: Path) -> None:
    """Ray itself, from its own package, over the wire between two namespaces."""
    code = (
        "import json, os, ray\n"
        "ray.init(logging_level='ERROR')\n"
        "@ray.remote(num_cpus=0)\n"
        "def where(): return ray.util.get_node_ip_address()\n"
        "names = ('n0', 'n1')\n"
        "print(json.dumps(ray.get([where.options(resources={f'node-name:{n}': 1}).remote() for n in names], timeout=60)))\n"
        "raise SystemExit(7)\n"
    )
    source = str(Path(node.__file__).parents[1])
    text = script(two_nodes(str(ray_python), "-c", code), python=str(ray_python), join_seconds=120)
    done = slurm.run(text, timeout=300, PYTHONPATH=source)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["10.77.0.1", "10.77.0.2"]


@pytest.mark.parametrize("skew", [-3600, 3600])
def test_a_node_whose_clock_is_off_says_so_before_it_joins(capsys: Any, skew: int) -> None:
    words = ["--prefix", "127.", "--node", "n5", "--port", "1", "--head", "127.0.0.1", "--within", "5"]
    with pytest.raises(SystemExit) as ended:
        node.main(["join", *words, "--head-time", str(time.time() + skew)])
    assert ended.value.code == node.UNREACHABLE
    assert f"the clock of node n5 is {-skew:+.0f} s off the head's" in capsys.readouterr().err


def test_waiting_for_a_head_is_bounded() -> None:
    began = time.monotonic()
    assert not node.reach("127.0.0.1", 9, 1.0)
    assert time.monotonic() - began < 10


@pytest.mark.fault("CFG-02")
def test_options_of_a_node_are_never_abbreviated() -> None:
    with pytest.raises(SystemExit):
        node.main(["address", "--pre", "10.", "--node", "n0"])
