"""``launcher.name = "slurm"``: one sbatch script that starts Ray on every node and the driver on the first."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, field_validator
from rlcore.errors import ConfigError
from rlcore.quoting import quoted, word

if TYPE_CHECKING:
    from rlcore.config import RunConfig
    from rlcore.types import Cluster, NodePlan

__all__ = ["Slurm"]


class Slurm:
    """Renders the script; ``--submit`` gives it to ``sbatch``.

    In the job: the head's address on the fabric is found (none: it fails at once, naming prefix and node), Ray starts on
    the head, the others join it within a bound, the driver starts when every node is there by name, and its exit status
    is the job's.
    """

    class Config(BaseModel):
        """The cluster's own facts."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        fabric_prefix: str | None = Field(
            None,
            pattern=r"^[0-9A-Fa-f.:]+$",
            description="start of each node's address on the fabric; unset: FABRIC_PREFIX of the job",
        )
        image: str | None = Field(None, description="container image of every step (pyxis); unset: no container")
        mounts: tuple[str, ...] = Field((), description="SOURCE:TARGET of the container")
        workdir: str | None = Field(None, description="folder of the job; default: where it is submitted")
        python: str = Field("python3", description="Python with rlcore, in the container or on the nodes")
        job_name: str = Field("rlcore", description="name of the job")
        partition: str | None = Field(None, description="partition")
        account: str | None = Field(None, description="account")
        time_limit: str = Field("24:00:00", description="time of the job, as Slurm writes it")
        log: str = Field("rlcore-%j.log", description="file of the job's output")
        options: tuple[str, ...] = Field((), description="more options of sbatch, as in --qos=high")
        join_seconds: int = Field(300, ge=1, description="bound of every wait for a node")
        setup: tuple[str, ...] = Field((), description="lines of shell before anything else, such as module load …")

        @field_validator("options")
        @classmethod
        def _options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
            for option in options:
                if not option.startswith("-"):
                    raise ValueError(f"{option!r} is no option of sbatch")
            return options

        @field_validator("job_name", "partition", "account", "time_limit", "log", "options", "workdir")
        @classmethod
        def _one_line(cls, value: object) -> object:
            if any("\n" in part for part in (value if isinstance(value, tuple) else (str(value),))):
                raise ValueError("must be one line")
            return value

    elsewhere: frozenset[str] = frozenset(
        {"gpus", "nodes", "ports", "scratch", "fabric", "head", "clock", "packages", "model", "served model"}
    )
    """Checks of a preflight that are about the job's nodes: they run there, before the driver starts."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def render(self, run: RunConfig, cluster: Cluster) -> str:
        """The script."""
        return "\n".join([*self._header(cluster), *self._start(cluster), *self._steps(cluster)]) + "\n"

    def launch(self, run: RunConfig, cluster: Cluster) -> int:
        """Give the script to ``sbatch``."""
        if shutil.which("sbatch") is None:
            raise ConfigError("launcher 'slurm': there is no sbatch here; submit from a login node, or keep the script")
        return subprocess.run(["sbatch"], input=self.render(run, cluster), text=True, check=False).returncode

    # --- the script

    def _header(self, cluster: Cluster) -> Iterator[str]:
        config = self.config
        yield "#!/bin/bash"
        options = [
            f"--job-name={config.job_name}",
            f"--nodes={cluster.nodes}",
            "--ntasks-per-node=1",
            "--exclusive",
            f"--time={config.time_limit}",
            f"--output={config.log}",
        ]
        options += [f"--gpus-per-node={cluster.gpus_per_node}"] if cluster.gpus_per_node else []
        options += [f"--partition={config.partition}"] if config.partition else []
        options += [f"--account={config.account}"] if config.account else []
        options += [f"--chdir={config.workdir}"] if config.workdir else []
        for option in [*options, *config.options]:
            yield f"#SBATCH {shlex.quote(option)}"
        yield ""
        yield "set -euo pipefail"
        yield from config.setup

    def _start(self, cluster: Cluster) -> Iterator[str]:
        config = self.config
        prefix = shlex.quote(config.fabric_prefix) if config.fabric_prefix else '"${FABRIC_PREFIX:-}"'
        container = [f"--container-image={config.image}"] if config.image else []
        container += [f"--container-mounts={','.join(config.mounts)}"] if config.image and config.mounts else []
        container += ["--no-container-mount-home"] if config.image else []
        yield f"""
fail() {{
  echo "rlcore: error: $*" >&2
  exit 3
}}

FABRIC_PREFIX={prefix}
[ -n "$FABRIC_PREFIX" ] || fail "FABRIC_PREFIX is empty: set launcher.fabric_prefix to the start of a node's fabric address"
export FABRIC_PREFIX

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[ "${{#NODES[@]}}" -eq {cluster.nodes} ] || fail "the job has ${{#NODES[@]}} nodes, the run needs {cluster.nodes}"
HEAD_NODE=${{NODES[0]}}
PORT={cluster.ports.get("ray", 6379)}
WITHIN={config.join_seconds}
NODE=({quoted([config.python, "-m", "rlcore_launchers.node"])})
STEP=({quoted(["srun", "--overlap", "--nodes=1", "--ntasks=1", *container])})

# the head's address on the fabric, or nothing at all
HEAD_IP=$("${{STEP[@]}}" --nodelist="$HEAD_NODE" "${{NODE[@]}}" address --prefix "$FABRIC_PREFIX" --node "$HEAD_NODE") || true
[ -n "$HEAD_IP" ] || fail "no address of the head node $HEAD_NODE begins with '$FABRIC_PREFIX'"
HEAD_TIME=$(date +%s)
export HEAD_TIME HEAD_ADDRESS="$HEAD_IP:$PORT"

# shellcheck disable=SC2317  # the traps call it
cleanup() {{
  trap - EXIT TERM INT
  for signal in TERM KILL; do
    jobs -pr | xargs -r kill -s "$signal" 2>/dev/null || true
    for _ in $(seq 50); do
      [ -n "$(jobs -pr)" ] || return 0
      sleep 0.2
    done
  done
}}
trap cleanup EXIT
trap 'cleanup; exit 143' TERM
trap 'cleanup; exit 130' INT
"""

    def _steps(self, cluster: Cluster) -> Iterator[str]:
        gpus = f" --gpus {cluster.gpus_per_node}" if cluster.gpus_per_node else ""
        plans = list(cluster.plans)
        secrets = sorted({name for plan in plans for name in plan.env if _is_secret(name, plan, cluster)})
        head = next((plan for plan in plans if 0 in plan.nodes), None)
        environment = self._environment(head, [], cluster)
        at_head = '"${STEP[@]}" --nodelist="$HEAD_NODE"'
        yield "# Ray's head"
        yield (
            f'{at_head} {environment}"${{NODE[@]}}" head --prefix "$FABRIC_PREFIX" --node "$HEAD_NODE" --port "$PORT"{gpus} &'
        )
        yield "HEAD=$!"
        joining = f'join --prefix "$FABRIC_PREFIX" --port "$PORT"{gpus} --head "$HEAD_IP" --within "$WITHIN"'
        for plan in plans:
            nodes = [node for node in plan.nodes if node]
            if not nodes:
                continue
            yield f"\n# {plan.role}"
            yield f"INDICES=({' '.join(map(str, nodes))})"
            yield 'for index in "${INDICES[@]}"; do'
            yield "  node=${NODES[$index]}"
            yield (
                f'  "${{STEP[@]}}" --nodelist="$node" {self._environment(plan, secrets, cluster)}"${{NODE[@]}}" {joining} '
                '--head-time "$HEAD_TIME" --node "$node" &'
            )
            yield "done"
        yield "\n# the driver, when every node is there; its exit status is the job's"
        yield "# shellcheck disable=SC2016  # its words are literal"
        yield f"DRIVER=({quoted(cluster.driver)})"
        yield "status=0"
        yield (
            f'{at_head} {environment}"${{NODE[@]}}" drive --head "$HEAD_IP" --port "$PORT" --within "$WITHIN" '
            f'--nodes "${{NODES[@]}}" --command "${{DRIVER[@]}}" &'
        )
        yield "MAIN=$!"
        yield 'wait -n "$HEAD" "$MAIN" || status=$?'
        yield 'kill -0 "$MAIN" 2>/dev/null && fail "Ray on the head node $HEAD_NODE ended (status $status) before the driver"'
        yield 'exit "$status"'

    def _environment(self, plan: NodePlan | None, without: list[str], cluster: Cluster) -> str:
        """``env`` in front of a command: variables of this role, without credentials that it does not need."""
        if plan is None:
            return ""
        words = [part for name in without if name not in plan.env for part in ("-u", name)]
        given = [f"{name}={value}" for name, value in plan.env.items() if value != f"${{{name}}}" and "${" not in value]
        return f"env {' '.join([*words, *map(word, given)])} " if words or given else ""


def _is_secret(name: str, plan: NodePlan, cluster: Cluster) -> bool:
    """A variable that is passed on by reference and that not every process needs."""
    return plan.env[name] == f"${{{name}}}" and name not in cluster.pinned
