"""What runs on a node of a cluster before and beside Ray: ``python3 -m rlcore_launchers.node``; standard library only.

``address`` finds the node's address on the fabric, ``head`` and ``join`` start Ray there with every wait bounded, ``drive``
waits for all nodes by name and becomes the driver. What fails says which node and why, on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

__all__ = ["addresses", "main"]

WRONG_ADDRESS, UNREACHABLE, NO_RAY, INCOMPLETE = 3, 4, 5, 6
"""Exit statuses, each with its line on standard error."""


def addresses() -> list[str]:
    """The IPv4 and IPv6 addresses of this node, loopback last."""
    try:
        out = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, timeout=10, check=True).stdout
        found = re.findall(r"\binet6? ([0-9a-fA-F.:]+)", out)
    except (OSError, subprocess.SubprocessError):
        found = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    found = [address for address in dict.fromkeys(found) if not address.startswith("fe80:")]
    return sorted(found, key=lambda address: address.startswith("127.") or address == "::1")


def interface_of(address: str) -> str:
    """The interface that has an address; empty if that cannot be found out."""
    try:
        out = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    rows = (line.split() for line in out.splitlines())
    return next((row[1] for row in rows if len(row) > 3 and row[3].partition("/")[0] == address), "")


def own_address(prefix: str, node: str) -> str:
    """The address of this node that begins with ``prefix``; exits if there is none, naming prefix and node."""
    found = addresses()
    matching = [address for address in found if prefix and address.startswith(prefix)]
    if not matching:
        _fail(
            WRONG_ADDRESS,
            f"no address of node {node} begins with {prefix!r}; it has {', '.join(found) or 'none'}: "
            "set launcher.fabric_prefix (FABRIC_PREFIX) to the start of its address on the fabric",
        )
    return matching[0]


def reach(host: str, port: int, seconds: float) -> bool:
    """Whether something listens there within the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=min(2.0, max(0.1, deadline - time.monotonic()))).close()
        except OSError:
            time.sleep(0.3)
        else:
            return True
    return False


def head(args: argparse.Namespace) -> int:
    """Start Ray's head on this node and stay with it."""
    args.own = own_address(args.prefix, args.node)
    return _ray(["--head", f"--port={args.port}", "--dashboard-host=127.0.0.1"], args)


def join(args: argparse.Namespace) -> int:
    """Join Ray's head and stay; tries again until the time is over."""
    args.own = own = own_address(args.prefix, args.node)
    deadline = time.monotonic() + args.within
    skew = time.time() - args.head_time if args.head_time else 0.0
    if not -10 < skew < args.within + 300:
        _fail(UNREACHABLE, f"the clock of node {args.node} is {skew:+.0f} s off the head's: start chrony or ntpd there")
    while True:
        if not reach(args.head, args.port, deadline - time.monotonic()):
            _fail(
                UNREACHABLE,
                f"node {args.node} ({own}) cannot reach the head {args.head}:{args.port} within {args.within:.0f} s: "
                "is its address on the fabric, and is the port open between nodes?",
            )
        joined = time.monotonic()
        status = _ray([f"--address={args.head}:{args.port}"], args)
        if status == 0 or time.monotonic() - joined > 60:  # it was a member for a while: this is its end
            return status
        if time.monotonic() >= deadline:
            _fail(
                NO_RAY, f"node {args.node} could not join Ray at {args.head}:{args.port}: ray start ended with {status}"
            )
        time.sleep(1.0)


def drive(args: argparse.Namespace) -> int:
    """Wait until every node is there, then become the driver; its exit status is this one's."""
    deadline = time.monotonic() + args.within
    if not reach(args.head, args.port, args.within):
        _fail(UNREACHABLE, f"Ray's head {args.head}:{args.port} did not start within {args.within:.0f} s")
    missing = list(args.nodes)
    while missing and time.monotonic() < deadline:
        present = _present(args.head, args.port, max(5.0, deadline - time.monotonic()))
        missing = [node for node in args.nodes if node not in present]
        if missing:
            time.sleep(1.0)
    if missing:
        _fail(
            INCOMPLETE,
            f"{len(missing)} of {len(args.nodes)} nodes did not join Ray within {args.within:.0f} s: {', '.join(missing)}",
        )
    os.environ["RAY_ADDRESS"] = f"{args.head}:{args.port}"
    print(f"all {len(args.nodes)} nodes are there; starting the driver", file=sys.stderr, flush=True)
    return _stay(args.command)


def _present(host: str, port: int, seconds: float) -> set[str]:
    """Names of the nodes that Ray knows as alive; asked in a process of its own, so that it can be given up."""
    code = (
        "import json, logging, ray; "
        f"ray.init(address={f'{host}:{port}'!r}, logging_level=logging.ERROR, log_to_driver=False); "
        "print(json.dumps([r for n in ray.nodes() if n['Alive'] for r in n['Resources']]))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds, check=False
        )
        names = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return set()
    return {name.removeprefix("node-name:") for name in names if name.startswith("node-name:")}


def _ray(options: Sequence[str], args: argparse.Namespace) -> int:
    interface = interface_of(args.own)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "FABRIC_IFNAME") if interface else ():
        os.environ.setdefault(name, interface)
    resources = json.dumps({f"node-name:{args.node}": 1})
    beside = os.path.dirname(sys.executable)  # where pip put it, in an environment that is not on the path
    line = [
        shutil.which("ray", path=os.pathsep.join([os.environ.get("PATH", os.defpath), beside])) or "ray",
        "start",
        *options,
        f"--node-ip-address={args.own}",
        f"--resources={resources}",
        "--disable-usage-stats",
        "--block",
    ]
    if args.gpus is not None:
        line.append(f"--num-gpus={args.gpus}")
    try:
        return _stay(line)
    except FileNotFoundError:
        _fail(NO_RAY, f"node {args.node} has no ray command: pip install 'rlcore-launchers[ray]' there or in the image")


def _stay(line: Sequence[str]) -> int:
    """Run a command, pass signals on to its process group, and return its exit status."""
    child = subprocess.Popen(line, start_new_session=True)

    def forward(number: int, _: object) -> None:
        os.killpg(child.pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _fail(status: int, message: str) -> None:
    print(f"rlcore: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m rlcore_launchers.node", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], *options: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, allow_abbrev=False)
        made.set_defaults(run=run)
        kinds: dict[str, Callable[[str], object]] = {
            "--port": int, "--within": float, "--head-time": float, "--gpus": int, "--prefix": str, "--node": str,
            "--head": str,
        }  # fmt: skip
        for option in options:
            optional = option in ("--gpus", "--head-time")
            made.add_argument(option, type=kinds[option], required=not optional)
        return made

    command("address", lambda args: print(own_address(args.prefix, args.node)) or 0, "--prefix", "--node")
    command("head", head, "--prefix", "--node", "--port", "--gpus")
    command("join", join, "--prefix", "--node", "--port", "--gpus", "--head", "--within", "--head-time")
    driver = command("drive", drive, "--head", "--port", "--within")
    driver.add_argument("--nodes", nargs="+", required=True)
    driver.add_argument("--command", nargs=argparse.REMAINDER, required=True)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """One of the subcommands."""
    args = _parser().parse_args(arguments)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
